"""Half precision together with everything else: split layers, late values, recomputation, compilers, norms, hooks."""

import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for
from tests.ranks.half_precision import ByHand, half_rank, weights_each_way
from tests.ranks.test_state_sharding import SAMPLES, assert_equal

PP1: dict[str, Any] = {"pipeline_parallel_degree": 1, "bf16": True}
PP2: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2, "bf16": True}
SDP2: dict[str, Any] = {**PP1, "sharded_data_parallel_degree": 2}


@pytest.mark.dear
@pytest.mark.parametrize(
    ("world", "options"),
    [(2, PP1), (4, PP2), (4, SDP2), (4, {**PP1, "shard_optimizer_state": True})],
    ids=["tp2", "pp2 tp2", "sdp2 tp2", "zero1 tp2"],
)
def test_split_layers_compute_in_half_precision(world, options):
    found = run_ranks(half_rank, world, "gpt2", "momentum", {**options, "tensor_parallel_degree": 2})
    whole = run_ranks(half_rank, world // 2, "gpt2", "momentum", options)[0][0]
    for *_, restored, _ in found:
        assert {tensor.dtype for tensor in restored.values()} == {torch.float32}
        for name, value in whole.items():  # sums of parts are rounded to bfloat16 apart
            torch.testing.assert_close(restored[name], value, rtol=0.03, atol=0.03)


AGAIN = {"activation_checkpointing": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "each computed again": AGAIN,
    "selective": {**AGAIN, "selective_checkpointing": True},
    "contiguous": {**AGAIN, "checkpoint_strategy": "contiguous"},
    "on the host": {"offload_activations": True, "offload_min_bytes": 1},
}


@pytest.mark.dear
@pytest.mark.parametrize("options", [PP2, SDP2], ids=["pp2", "sdp2"])
def test_units_that_are_computed_again_or_wait_on_the_host_have_the_same_bits(options):
    ways = [options, *({**options, **way} for way in WAYS.values())]
    expected, *others = run_ranks(weights_each_way, 2, "gpt2", ways)[0]
    for way, found in zip(WAYS, others, strict=True):
        assert_equal(found, expected, way)


def late(options: dict[str, Any], is_late: bool) -> Any:
    torch.manual_seed(0)
    with torch.device("meta" if is_late else "cpu"):
        model = MODELS["forked"]()
    engine = Engine(SMPConfig(**options, delayed_parameter_initialization=is_late))
    optimizer = SGD(model.parameters(), 0.1)
    engine.attach(model, [optimizer])
    for step in range(2):
        result = engine.train_step(model.loss, batch_for("forked", step, SAMPLES), loss_of=lambda loss: loss)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    state = engine.saved.full_state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("precision", ["bf16", "fp16_params"])
def test_values_that_are_made_late_are_those_of_every_layout(precision):
    options = {"pipeline_parallel_degree": 1, "microbatches": 2, precision: True}
    [expected] = run_ranks(late, 1, options, True)
    assert all(tensor.isfinite().all() for tensor in expected.values())
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32 if precision == "bf16" else torch.float16}
    for world, other in ((2, {"pipeline_parallel_degree": 2}), (2, {"sharded_data_parallel_degree": 2})):
        found = run_ranks(late, world, {**options, **other}, True)[0]
        if "sharded_data_parallel_degree" not in other:  # where both ranks read the same samples twice
            assert_equal(found, expected)
        else:
            assert {name: tensor.shape for name, tensor in found.items()} == {
                name: tensor.shape for name, tensor in expected.items()
            }


class Statistics(nn.Module):
    """A convolution, a norm with running statistics and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.convolution(x)).transpose(1, 2)
        return x + self.recurrent(hidden)[0].transpose(1, 2)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Statistics() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, batch["y"])


UNITS = [f"blocks.{number}" for number in range(4)]


def deep_batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(4, 4, 6, generator=generator), "y": torch.randn(4, 4, 6, generator=generator)}


def with_statistics(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Deep()
    engine = Engine(SMPConfig(**options))
    optimizer = SGD(model.parameters(), 0.1)
    engine.attach(model, [optimizer])
    assert [unit.name for unit in engine.layout.units] == UNITS
    for step in range(3):
        result = engine.train_step(model.loss, deep_batch(step), loss_of=lambda loss: loss)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    state = engine.saved.full_state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("options", [PP1, {**PP2, "microbatches": 1}], ids=["one rank", "pp2"])
def test_norms_with_running_statistics_stay_in_float32(options):
    torch.manual_seed(0)
    model = Deep()
    by_hand = ByHand(model, UNITS, torch.bfloat16)
    optimizer = SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        by_hand.backward(deep_batch(step), 1.0)
        optimizer.step()
    found = run_ranks(with_statistics, options["pipeline_parallel_degree"], options)[0]
    assert found["blocks.0.norm.running_mean"].dtype == torch.float32
    # A recurrent layer uses its weights once per step: by hand these gradients are added up in bfloat16.
    assert_equal(found, model.state_dict(), tolerance=1e-3)


def compiled(options: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")  # what torch.compile itself causes in torch
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return half_rank("text", "momentum", options)[0]


@pytest.mark.dear
@pytest.mark.parametrize("options", [PP1, SDP2], ids=["one rank", "sdp2"])
def test_compiled_units_compute_in_half_precision(options):
    world = options.get("sharded_data_parallel_degree", 1)
    expected = run_ranks(compiled, world, options)[0]
    found = run_ranks(compiled, world, {**options, "compile": True}, timeout=110)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.01, atol=0.01)


def hooked(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = MODELS["text"]()
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [])
    seen: list[Any] = []
    weight = model.blocks[0].mlp[0].weight
    weight.register_hook(lambda gradient: seen.append(("before", gradient.dtype)) or gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(("after", parameter.grad.dtype)))
    result = engine.train_step(model.loss, batch_for("text", 0, SAMPLES), loss_of=lambda loss: loss)
    result.commit(torch.ones(()), reduce=True)
    found = weight.grad.clone()
    engine.close()
    return seen, found


def test_hooks_on_masters_see_float32_gradients():
    seen, found = run_ranks(hooked, 1, {**PP1, "microbatches": 2})[0]
    assert seen == [("before", torch.float32), ("after", torch.float32)] * 2
    torch.manual_seed(0)
    model = MODELS["text"]()
    units = ["embed", "norm", "head", *(f"blocks.{number}" for number in range(6))]
    by_hand = ByHand(model, units, torch.bfloat16)
    batch = batch_for("text", 0, SAMPLES)
    for half in range(2):
        part = {key: value[half * SAMPLES // 2 : (half + 1) * SAMPLES // 2] for key, value in batch.items()}
        by_hand.backward(part, 0.5)
    assert torch.equal(found, 2 * model.blocks[0].mlp[0].weight.grad)


def freezing(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = MODELS["text"]()
    engine = Engine(SMPConfig(**options))
    optimizer = SGD(model.parameters(), 0.1)
    engine.attach(model, [optimizer])
    weights = []
    for step in range(4):
        model.blocks[2].requires_grad_(step in (0, 2))
        result = engine.train_step(model.loss, batch_for("text", step, SAMPLES), loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        state = engine.saved.full_state_dict()
        weights.append(state["blocks.2.norm.weight"].clone() if state else None)
    engine.close()
    return weights


@pytest.mark.parametrize(("world", "options"), [(1, PP1), (2, PP2), (2, SDP2)], ids=["one rank", "pp2", "sdp2"])
def test_weights_may_be_frozen_and_unfrozen_between_steps(world, options):
    first, second, third, fourth = run_ranks(freezing, world, options)[0]
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(third, fourth)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return self.linear(x)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(2))

    def loss(self, x: Tensor) -> Tensor:
        x = x * 2
        return (self.blocks[1](self.blocks[0](x)) + x).mean()


def changing() -> None:
    model = ChangesItsInput()
    engine = Engine(SMPConfig(**PP1))
    engine.attach(model)
    engine.train_step(model.loss, torch.ones(2, 4), loss_of=lambda loss: loss)


def test_a_change_in_place_that_a_cast_would_hide_is_refused():
    with pytest.raises(RuntimeError, match="`InPlace` changes an argument of shape .* in place, which was cast to"):
        run_ranks(changing, 1)
