"""A model that is built on the meta device gets the same values under every layout, and each rank its share of them."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.errors import ConfigError, SMPError, UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks
from tests.parity.models import VOCABULARY, Text, WeightsInTheGlue

MICROBATCHES = 2
STEPS = 2


class Scale(nn.Module):
    """Has what PyTorch's layers do not have: a parameter of its own, and a buffer that is computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.scale.view(1, -1))
        self.table = torch.arange(len(self.scale), device=self.scale.device, dtype=torch.float)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table


class Mixed(nn.Module):
    """Batch statistics, attention of PyTorch's own, a frozen layer, tied weights, an initialiser that reaches far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.before = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Scale(8))
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.before[0].weight.mul_(0.5)
            self.attention.linear2.weight.normal_(std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.before(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, -1)
        return self.head(self.norm(self.frozen(self.attention(x))))

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["tokens"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["tokens"].flatten())


class HuggingFace(nn.Module):
    """A model that knows its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss


def gpt2() -> nn.Module:
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16}
    random = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **random, bos_token_id=0, eos_token_id=0)
    return HuggingFace(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
    )
    return HuggingFace(LlamaForCausalLM(config))


class LabelledText(Text):
    """Fed with tokens alone; the parameter in the glue has an initialiser."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position)

    def loss(self, batch: Any) -> Tensor:
        return super().loss({"tokens": batch["tokens"], "labels": batch["tokens"]})


class LabelledWeightsInTheGlue(LabelledText, WeightsInTheGlue):
    pass


MODELS: dict[str, Callable[[], nn.Module]] = {
    "text": LabelledText,
    "tied across stages": lambda: LabelledText(tied=True),
    "weights in the glue": LabelledWeightsInTheGlue,
    "mixed": Mixed,
    "gpt2": gpt2,
    "llama": llama,
}


def batch(step: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    with torch.device("meta"):
        return make()


def engine_for(
    model: nn.Module, *optimizers: torch.optim.Optimizer, pp: int | None = None, is_on: bool = True, **options: Any
) -> Engine:
    config = SMPConfig(
        pipeline_parallel_degree=pp or dist.get_world_size(),
        microbatches=MICROBATCHES,
        delayed_parameter_initialization=is_on,
        **options,
    )
    engine = Engine(config)
    engine.attach(model, optimizers)
    return engine


def loss_of(loss: Tensor) -> Tensor:
    return loss


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in found}


def train(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        result = engine.train_step(model.loss, batch(step), loss_of=loss_of)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        optimizer.step()


def values_and_training(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a model begins with, buffers included, and what it is after training."""
    begun = on_meta(MODELS[name])
    engine = engine_for(begun)
    begun.eval()
    with torch.inference_mode():
        engine.eval_step(begun.loss, batch(0))
    engine.restore_everywhere()

    model = on_meta(MODELS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = engine_for(model, optimizer)
    train(engine, model, optimizer)
    engine.restore_everywhere()
    return tensors_of(begun), tensors_of(model)


def train_plainly(name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train an ordinary module that begins with ``values`` in one process."""
    model = MODELS[name]()
    with torch.no_grad():
        for tensors in (model.named_parameters(), model.named_buffers()):
            for each, tensor in tensors:
                tensor.copy_(values[each])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        cut, sizes = split(batch(step), MICROBATCHES)
        for part, size in zip(cut, sizes, strict=True):
            (model.loss(part) * (size / sum(sizes))).backward()
        optimizer.step()
    return tensors_of(model)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.dear
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_every_layout_and_training_is_that_of_a_module_that_has_them(name):
    [(values, trained)] = run_ranks(values_and_training, 1, name)
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in values.values())
    # Weights in the glue, and such as stages share, get their gradients in parts.
    exact = name in ("text", "llama")
    assert_same(trained, train_plainly(name, values), 0.0 if exact else 1e-6)
    for pp in (2, 4):
        for found, found_trained in run_ranks(values_and_training, pp, name):
            assert_same(found, values)
            assert_same(found_trained, trained, 0.0 if exact else 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixed"])
def test_values_are_distributed_like_those_of_the_constructor(name):
    [(values, _)] = run_ranks(values_and_training, 1, name)
    torch.manual_seed(0)
    for each, tensor in tensors_of(MODELS[name]()).items():
        if tensor.numel() >= 64:
            torch.testing.assert_close(values[each].std(), tensor.std(), rtol=0.4, atol=0.0, msg=each)
        elif not tensor.is_floating_point() or tensor.unique().numel() == 1 or "table" in each or "freq" in each:
            assert torch.equal(values[each], tensor), each
    if name == "gpt2":
        residual, plain = (values[f"model.transformer.h.0.mlp.{each}.weight"] for each in ("c_proj", "c_fc"))
        assert residual.std() < 0.5 * plain.std()


def identities() -> tuple[bool, bool, int, int]:
    model = on_meta(lambda: LabelledText(tied=True))
    model.norm.weight.requires_grad_(False)
    hooked: list[Tensor] = []
    model.norm.bias.register_hook(hooked.append)
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    engine = engine_for(model, optimizer)
    train(engine, model, optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_same = all(a is b is c for a, b, c in zip(before, held, model.parameters(), strict=True))
    is_tied = model.head.weight is model.embed.weight and not model.norm.weight.requires_grad
    states = [value for state in optimizer.state.values() for value in state.values()]
    return is_same, is_tied, len(hooked), sum(value.is_meta for value in states)


def test_parameters_stay_the_same_objects_for_optimizers_ties_and_hooks():
    found = run_ranks(identities, 2)
    assert [each[:2] for each in found] == [(True, True)] * 2
    assert sorted(each[2] for each in found)[-1] > 0
    assert [each[3] for each in found] == [0, 0]


class LivingBytes(TorchDispatchMode):
    """Counts the bytes of all memory that exists and was made since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            has_memory = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor | DeferredTensor)
            if has_memory and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        living = {number: storage for number, each in self._storages.items() if (storage := each()) is not None}
        self._storages = {number: self._storages[number] for number in living}
        self.most = max(self.most, sum(storage.nbytes() for storage in living.values()))
        return result


def bytes_while_a_share_is_taken(
    monkeypatch: pytest.MonkeyPatch, pp: int, model: nn.Module | None = None, **options: Any
) -> tuple[int, ...]:
    model = on_meta(lambda: LabelledText(width=256)) if model is None else model
    engine = engine_for(model, pp=pp, sdp_param_persistence_threshold=0, **options)
    counter = LivingBytes()
    construct = LocalModel.__init__

    def counted(self: LocalModel, *args: Any, **kwargs: Any) -> None:
        with counter:
            construct(self, *args, **kwargs)
        sharded = self.holdings.sharded
        replicated = [each for each in self.holdings.parameters if not sharded.has(each)]
        share = sum(each.untyped_storage().nbytes() for each in replicated)
        found.append(share + sharded.held_bytes)

    found: list[int] = []
    monkeypatch.setattr(LocalModel, "__init__", counted)
    engine.train_step(model.loss, batch(0), loss_of=loss_of)
    units = [sum(parameter.nbytes for parameter in unit.module.parameters()) for unit in engine.layout.units]
    return counter.most, found[0], max(units), sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("pp", [2, 4])
def test_no_stage_ever_has_more_than_its_share_and_one_unit(pp, monkeypatch):
    for most, share, unit, total in run_ranks(bytes_while_a_share_is_taken, pp, monkeypatch, pp):
        assert 0.9 * share <= most <= share + unit  # what no unit has was there before
        assert share < 0.75 * total


def bytes_in_a_shard_group(monkeypatch: pytest.MonkeyPatch, pp: int, degree: int) -> tuple[int, ...]:
    return bytes_while_a_share_is_taken(monkeypatch, pp, sharded_data_parallel_degree=degree)


@pytest.mark.parametrize(("pp", "degree"), [(1, 4), (2, 2)])
def test_no_rank_of_a_shard_group_ever_has_more_than_its_share_and_one_unit_with_its_flat_buffer(
    pp, degree, monkeypatch
):
    for most, share, unit, total in run_ranks(bytes_in_a_shard_group, pp * degree, monkeypatch, pp, degree):
        assert 0.9 * share <= most <= share + 2 * unit
        assert share < 0.5 * total


def values_and_training_under(pp: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All ranks see the same samples, so replicas change nothing; their seeds differ."""
    found = []
    for steps in (range(0), range(STEPS)):
        torch.manual_seed(3 + dist.get_rank())
        with torch.device("meta"):
            model = LabelledText(tied=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine = engine_for(model, optimizer, pp=pp, **options)
        engine.eval_step(model.loss, batch(0))
        for step in steps:
            result = engine.train_step(model.loss, batch(step), loss_of=loss_of)
            optimizer.zero_grad()
            result.commit(torch.ones(()), reduce=True)
            engine.begin_update(optimizer)
            optimizer.step()
            engine.end_update(optimizer)
        engine.restore_everywhere()
        found.append(tensors_of(model))
    return found[0], found[1]


@pytest.mark.dear
@pytest.mark.parametrize(
    ("world", "pp", "degree", "threshold"), [(2, 1, 2, 0), (4, 2, 1, 0), (4, 2, 2, 0), (4, 1, 2, 200), (4, 1, 4, 0)]
)
def test_values_do_not_depend_on_replicas_and_shards(world, pp, degree, threshold):
    [(values, trained)] = run_ranks(values_and_training_under, 1, 1, {})
    options = {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": threshold}
    for found, found_trained in run_ranks(values_and_training_under, world, pp, options):
        assert_same(found, values)
        assert_same(found_trained, trained, 1e-6)


def build_differently() -> str:
    model = LabelledText() if dist.get_rank() == 0 else on_meta(LabelledText)
    try:
        engine_for(model)
    except SMPError as error:
        return str(error)
    return "not refused"


def test_ranks_that_do_not_build_alike_are_refused_everywhere():
    for message in run_ranks(build_differently, 2):
        assert (
            "Ranks have different tensors on the meta device: `position`, for example; by rank, so many: [0" in message
        )


def attach_without_the_option() -> str:
    try:
        engine_for(on_meta(LabelledText) if dist.get_rank() else LabelledText(), is_on=False)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_module_on_the_meta_device_needs_the_option():
    for message in run_ranks(attach_without_the_option, 2):
        assert "`position` is on the meta device and has no values. Set `delayed_parameter_initialization" in message


def train_what_has_values(is_on: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = LabelledText()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = engine_for(model, optimizer, is_on=is_on)
    train(engine, model, optimizer)
    return engine.saved.full_state_dict()


def test_a_module_that_has_values_keeps_them():
    assert_same(run_ranks(train_what_has_values, 2, True)[0], run_ranks(train_what_has_values, 2, False)[0])


def step_that_looks(skip_tracing: bool) -> str:
    model = on_meta(LabelledText)
    engine = engine_for(model, skip_tracing=skip_tracing)
    try:
        engine.train_step(lambda each: model.loss(each) * model.loss(each).detach().item(), batch(0), loss_of=loss_of)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_a_step_that_looks_at_values_is_not_planned_without_any():
    for message in run_ranks(step_that_looks, 2, False):
        assert "the module is on the meta device and has none" in message
    assert run_ranks(step_that_looks, 2, True) == ["not refused"] * 2
