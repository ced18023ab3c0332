"""Whole-model state, ownership, gradient norms and sums, over real ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.grad_norm import global_norm
from smp_strategy.data_parallel.gradient_sums import sum_gradients
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.engine.engine import Engine
from smp_strategy.model.ownership import home_of
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Remembering(Block):
    """Has a state that is no tensor."""

    def __init__(self, tag: str = "") -> None:
        super().__init__()
        self.tag = tag

    def get_extra_state(self) -> dict[str, str]:
        return {"tag": self.tag}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.tag = state["tag"]


class Model(nn.Module):
    """Tied weights, buffers of units and of the glue, a glue parameter, extra state, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.blocks = nn.ModuleList([Block(), Remembering("second"), Block(), Block()])
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.table.sum()
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), tokens)


def tokens(step: int) -> Tensor:
    return torch.randint(6, (8,), generator=torch.Generator().manual_seed(step))


def build(pp: int) -> tuple[Model, torch.optim.Optimizer, Engine]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=1))
    engine.attach(model, [optimizer])
    return model, optimizer, engine


def train(model: Model, optimizer: torch.optim.Optimizer, engine: Engine | None, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        if engine is None:
            model.loss(tokens(step)).backward()
        else:
            engine.train_step(model.loss, tokens(step), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
        optimizer.step()


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_equal(ours, theirs, f"{where}[{index}]")
    else:
        assert found == expected, where


def plain(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, None, range(steps))
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def states(pp: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer, engine = build(pp)
    train(model, optimizer, engine, range(steps))
    return engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_whole_state_is_that_of_one_process_bit_for_bit(pp, steps):
    first, *others = run_ranks(states, pp, pp, steps)
    expected = plain(steps)
    assert_equal(first[0], expected[0])
    assert_equal(first[1], expected[1])
    assert all(other == ({}, {}) for other in others)


def tied(pp: int) -> Any:
    model, optimizer, engine = build(pp)
    train(model, optimizer, engine, range(1))
    state: Any = engine.saved.full_state_dict()
    if not state:
        return None
    return state["head.weight"] is state["embed.weight"], state._metadata == Model().state_dict()._metadata


def test_tied_weights_are_one_tensor_in_the_whole_state_and_versions_are_kept():
    assert run_ranks(tied, 2, 2) == [(True, True), None]


def resumed(pp: int, weights: Any, moments: Any, *, after_first_step: bool) -> Any:
    model, optimizer, engine = build(pp)
    if after_first_step:
        train(model, optimizer, engine, range(1))
    engine.saved.load_state_dict(weights)
    engine.saved.load_optimizer_state(optimizer, moments)
    train(model, optimizer, engine, range(2, 4))
    return engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)


def resumed_late(pp: int, weights: Any, moments: Any) -> Any:
    return resumed(pp, weights, moments, after_first_step=True)


def resumed_early(pp: int, weights: Any, moments: Any) -> Any:
    return resumed(pp, weights, moments, after_first_step=False)


@pytest.mark.parametrize("resume", [resumed_early, resumed_late])
def test_training_goes_on_bit_for_bit_under_another_degree(resume):
    expected = plain(4)
    two = run_ranks(states, 2, 2, 2)[0]
    four = run_ranks(resume, 4, 4, *copy.deepcopy(two))[0]
    assert_equal(four[0], expected[0])
    assert_equal(four[1], expected[1])
    # ... and in one process.
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.load_state_dict(two[0])
    optimizer.load_state_dict(two[1])
    train(model, optimizer, None, range(2, 4))
    assert_equal(model.state_dict(), expected[0])


def held_bytes(pp: int, state: Any) -> list[tuple[str, int, bool]]:
    model, optimizer, engine = build(pp)
    train(model, optimizer, engine, range(1))
    engine.saved.load_state_dict(state)
    return [(name, p.untyped_storage().nbytes(), home_of(p) is not None) for name, p in model.named_parameters()]


def test_loading_gives_a_rank_its_own_share_only():
    shares = run_ranks(held_bytes, 4, 4, plain(1)[0])
    for name in ("blocks.0.linear.weight", "blocks.3.linear.weight"):
        rows = [row for share in shares for row in share if row[0] == name]
        assert sorted(row[1:] for row in rows) == [(4, True)] * 3 + [(64, False)]
    glue = [row for share in shares for row in share if row[0] == "scale"]
    assert glue == [("scale", 4, False)] * 4


def load_error(change: str) -> str:
    model, optimizer, engine = build(2)
    state = copy.deepcopy(model.state_dict())
    train(model, optimizer, engine, range(1))
    if change == "missing":
        del state["blocks.0.linear.weight"]
    elif change == "unexpected":
        state["other"] = torch.zeros(1)
    else:
        state["blocks.0.linear.weight"] = torch.zeros(5, 4)
    try:
        engine.saved.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing \['blocks.0.linear.weight'\]"),
        ("unexpected", r"unexpected \['other'\]"),
        ("shape", r"blocks.0.linear.weight \[5, 4\] instead of \[4, 4\]"),
    ],
)
def test_every_rank_refuses_a_state_that_does_not_fit(change, message):
    import re

    for found in run_ranks(load_error, 2, change):
        assert re.search(message, found), found


def norms(norm_type: float, max_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    model.head = nn.Linear(4, 6, bias=False)  # untied: no sum over stages
    engine = Engine(SMPConfig(pipeline_parallel_degree=dist.get_world_size(), microbatches=1))
    engine.attach(model)
    engine.train_step(model.loss, tokens(0), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    norm = engine.clip_grad_norm_(list(model.parameters()), max_norm, norm_type)
    return norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.daily
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("pp", [2, 4])
def test_clipping_is_that_of_one_process_bit_for_bit(pp, norm_type):
    torch.manual_seed(0)
    model = Model()
    model.head = nn.Linear(4, 6, bias=False)
    model.loss(tokens(0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    for norm, gradients in run_ranks(norms, pp, norm_type, 0.1):
        assert torch.equal(norm, expected)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, dict(model.named_parameters())[name].grad), name


def reduce_with_gaps() -> list[Any]:
    """Rank 0 has gradients 0 and 1, rank 1 has 1 and 3; nobody has 2."""
    rank = dist.get_rank()
    results = []
    for factor in (1.0, 0.5):
        parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(4)]
        for index in ((0, 1), (1, 3))[rank]:
            parameters[index].grad = torch.full((2, 3), float(rank + 1))
        sum_gradients(parameters, dist.group.WORLD, factor=factor)
        results.append([None if p.grad is None else p.grad[0, 0].item() for p in parameters])
    return results


def test_a_missing_gradient_counts_as_zero_unless_nobody_has_one():
    for summed, averaged in run_ranks(reduce_with_gaps, 2):
        assert summed == [1.0, 3.0, None, 2.0]
        assert averaged == [0.5, 1.5, None, 1.0]


def reduce_dtypes() -> list[Any]:
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    parameters = [nn.Parameter(torch.zeros(3, dtype=kind)) for kind in kinds]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) * (dist.get_rank() + 1)
    sum_gradients(parameters, dist.group.WORLD)
    return [(p.grad.dtype, p.grad.tolist()) for p in parameters]


def test_gradients_of_several_dtypes_are_summed_in_their_own():
    for found in run_ranks(reduce_dtypes, 2):
        assert [values for _, values in found] == [[3.0] * 3] * 4


def norm_without_gradients() -> float:
    parameters, whole = [nn.Parameter(torch.zeros(3))], ParameterParts({}, TensorGroup(None))
    return float(global_norm(parameters, lambda _: True, [dist.group.WORLD], 2.0, whole))


def test_the_norm_of_no_gradients_is_zero():
    assert run_ranks(norm_without_gradients, 2) == [0.0, 0.0]
