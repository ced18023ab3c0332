"""Layers that are split before they have values: the values are those that the whole layers would have got."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.errors import UnsupportedError
from smp_strategy.tensor_parallel.autograd_collectives import add_up
from smp_strategy.tensor_parallel.autograd_collectives import copy as copy_
from smp_strategy.tensor_parallel.plan.registry import tp_register
from smp_strategy.testing import run_ranks
from tests.parity.models import VOCABULARY
from tests.ranks import test_delayed as delayed
from tests.ranks.test_delayed import MICROBATCHES, LivingBytes, Mixed, assert_same, batch, loss_of, on_meta, tensors_of

STEPS = 2
TOLERANCE = 1e-5


class Reaching(nn.Module):
    """Initialisers that ask for sizes of whole layers, and one that reaches into another layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight, std=self.up.out_features**-0.5)
        nn.init.uniform_(self.down.weight, a=0.0, b=1.0 / self.down.in_features)
        with torch.no_grad():
            self.down.bias.copy_(torch.arange(float(len(self.down.bias))) / self.down.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ByHand(nn.Module):
    """Pairs that are found in the step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Reaching(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def loss(self, given: Any) -> Tensor:
        x = self.embed(given["tokens"])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), given["tokens"].flatten())


def gpt2_with_heads(**sizes: int) -> nn.Module:
    """Heads for four ranks; 61 words, of which ranks have different numbers; the head is tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 4, "vocab_size": 61, "n_positions": 16, **sizes}
    random = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return delayed.HuggingFace(GPT2LMHeadModel(GPT2Config(**sizes, **random, bos_token_id=0, eos_token_id=0)))


class SplitReaching(nn.Module):
    """A twin of one's own."""

    def __init__(self, width: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(width, 4 * width // group.size), nn.Linear(4 * width // group.size, width)

    def forward(self, x: Tensor) -> Tensor:
        summand = nn.functional.linear(torch.relu(self.up(copy_(x, self.group))), self.down.weight)
        return x + add_up(summand, self.group) + self.down.bias


@tp_register(SplitReaching)
class Registered(Reaching):
    """Built whole, with a twin."""


def registered() -> nn.Module:
    model = ByHand()
    model.blocks = nn.ModuleList(Registered(8) for _ in range(4))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "by hand": ByHand,
    "gpt2": gpt2_with_heads,
    "mixed": Mixed,
    "registered": registered,
}


def engine_for(model: nn.Module, *optimizers: torch.optim.Optimizer, tp: int, **options: Any) -> Engine:
    config = SMPConfig(
        **{"pipeline_parallel_degree": 1, **options},
        tensor_parallel_degree=tp,
        microbatches=MICROBATCHES,
        delayed_parameter_initialization=True,
    )
    engine = Engine(config)
    engine.attach(model, optimizers)
    return engine


def train(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        result = engine.train_step(model.loss, batch(step), loss_of=loss_of)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)


def values_and_training(
    name: str, tp: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """What a model begins with, buffers included, what it is after training, and how many layers are split."""
    begun = on_meta(MODELS[name])
    engine = engine_for(begun, tp=tp, **options)
    begun.eval()
    engine.eval_step(begun.loss, batch(0))
    engine.restore_everywhere()

    model = on_meta(MODELS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = engine_for(model, optimizer, tp=tp, **options)
    train(engine, model, optimizer, range(STEPS))
    report = engine.layout.split_report
    num_split = 0 if report is None else sum(line.is_split for line in report.lines)
    engine.restore_everywhere()
    return tensors_of(begun), tensors_of(model), num_split


def layout_of(tp: int, pp: int, dp_shard: int = 1) -> tuple[int, int, dict[str, Any]]:
    """Number of ranks, and what :func:`engine_for` is given for them."""
    options: dict[str, Any] = {"pipeline_parallel_degree": pp}
    if dp_shard > 1:
        options |= {"sharded_data_parallel_degree": dp_shard, "sdp_param_persistence_threshold": 0}
    return tp * pp * dp_shard, tp, options


LAYOUTS = {
    "tp2": layout_of(2, 1),
    "tp2 pp2": layout_of(2, 2),
    "tp4": layout_of(4, 1),
    "tp2 sdp2": layout_of(2, 1, 2),
    "tp2 along the sequence": (2, 2, {"pipeline_parallel_degree": 1, "optimize": "memory"}),
}


@functools.cache
def dense(name: str) -> Any:
    """What :func:`values_and_training` finds on one rank."""
    return run_ranks(values_and_training, 1, name, 1, {})[0]


# How values come to the ranks of a layout is the same whatever has split the layers, so each pair of a source and a
# layout is here for two models at least only where that is cheap. PyTorch's own attention has two heads only.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("by hand", layout) for layout in LAYOUTS),
        *(("gpt2", layout) for layout in ("tp2 pp2", "tp4", "tp2 along the sequence")),
        *(("mixed", layout) for layout in ("tp2", "tp2 sdp2")),
        *(("registered", layout) for layout in ("tp2 pp2", "tp2 along the sequence")),
    ],
)
def test_values_are_those_of_the_dense_model_in_every_layout(name, layout):
    values, trained, _ = dense(name)
    world, tp, options = LAYOUTS[layout]
    for found, found_trained, num_split in run_ranks(values_and_training, world, name, tp, options):
        assert_same(found, values)
        assert_same(found_trained, trained, TOLERANCE)
        assert num_split > 2


def continued(state: Any, optimizer_state: Any, tp: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Train on from what was saved, or from the beginning; what is saved then."""
    model = on_meta(gpt2_with_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = engine_for(model, optimizer, tp=tp, **options)
    if state is not None:
        engine.saved.load_state_dict(copy.deepcopy(state))
        engine.saved.load_optimizer_state(optimizer, copy.deepcopy(optimizer_state))
    train(engine, model, optimizer, range(STEPS) if state is None else range(STEPS, 2 * STEPS))
    return engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)


@functools.cache
def saved_and_continued() -> Any:
    """What one rank saves, and then, after going on from it."""
    [saved] = run_ranks(continued, 1, None, None, 1, {})
    return saved, run_ranks(continued, 1, *saved, 1, {})[0]


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_that_are_loaded_before_the_first_step_are_cut_in_it(layout):
    world, tp, options = LAYOUTS[layout]
    saved, (weights, moments) = saved_and_continued()
    found, found_moments = run_ranks(continued, world, *saved, tp, options)[0]
    assert_same(found, weights, TOLERANCE)
    assert found_moments["state"].keys() == moments["state"].keys()
    for key, state in moments["state"].items():
        assert_same(found_moments["state"][key], state, TOLERANCE)
    assert not torch.equal(weights["model.lm_head.weight"], saved[0]["model.lm_head.weight"])


def bytes_of_the_first_step(
    monkeypatch: pytest.MonkeyPatch, name: str, tp: int, options: dict[str, Any]
) -> tuple[int, ...]:
    """Most bytes while all is decided, and while the share is taken; those of the share, of a unit, and of all."""
    model = on_meta(lambda: LARGE[name]())
    engine = engine_for(model, tp=tp, **options)
    units = [sum(parameter.nbytes for parameter in unit.module.parameters()) for unit in engine.layout.units]
    total = sum(parameter.nbytes for parameter in model.parameters())
    deciding, taking = LivingBytes(), LivingBytes()
    found: list[int] = []
    prepare, construct = DelayedModule.prepare, LocalModel.__init__

    def prepared(self: DelayedModule, *args: Any) -> None:
        deciding.__enter__()
        prepare(self, *args)

    def constructed(self: LocalModel, *args: Any, **kwargs: Any) -> None:
        deciding.__exit__(None, None, None)
        with taking:
            construct(self, *args, **kwargs)
        sharded = self.holdings.sharded
        replicated = [each for each in self.holdings.parameters if not sharded.has(each)]
        share = sum(each.untyped_storage().nbytes() for each in replicated)
        found.append(share + sharded.held_bytes)

    monkeypatch.setattr(DelayedModule, "prepare", prepared)
    monkeypatch.setattr(LocalModel, "__init__", constructed)
    engine.train_step(model.loss, batch(0), loss_of=loss_of)
    return deciding.most, taking.most, found[0], max(units), total


LARGE: dict[str, Callable[[], nn.Module]] = {
    "by hand": lambda: ByHand(256),
    "gpt2": lambda: gpt2_with_heads(n_embd=256),
}


# Tied weights and a table that is split unevenly, once beside stages and once beside shards.
@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "layout"), [*(("by hand", layout) for layout in LAYOUTS), ("gpt2", "tp2 pp2"), ("gpt2", "tp2 sdp2")]
)
def test_no_rank_ever_has_more_than_its_share_and_one_whole_unit(name, layout, monkeypatch):
    world, tp, options = LAYOUTS[layout]
    flat = 1 if options.get("sharded_data_parallel_degree") else 0
    for deciding, taking, share, unit, total in run_ranks(
        bytes_of_the_first_step, world, monkeypatch, name, tp, options
    ):
        assert deciding < unit  # weights that stand for others have no memory; activations have some
        assert 0.9 * share <= taking <= share + (1 + flat) * unit
        assert share < 0.7 * total


class FillsHalf(nn.Linear):
    """Forgets half of its rows."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight[: len(self.weight) // 2])
        nn.init.zeros_(self.bias)

    forward = nn.Linear.forward


def forget_rows() -> str:
    model = ByHand()
    with torch.device("meta"):
        model.blocks[1] = nn.Sequential(FillsHalf(8, 32), nn.ReLU(), nn.Linear(32, 8))
    engine = engine_for(model, tp=2)
    try:
        engine.train_step(model.loss, batch(0), loss_of=loss_of)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_rows_that_nothing_fills_are_refused_also_by_ranks_that_have_others():
    for message in run_ranks(forget_rows, 2):
        assert "Initialisers leave a part of `blocks.1.0.weight` without values" in message


def values_of_a_copy() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = on_meta(ByHand)
    average = copy.deepcopy(model)
    engine = engine_for(model, tp=2)
    engine.copies = lambda: [average]
    engine.eval_step(model.loss, batch(0))
    engine.restore_everywhere()
    return tensors_of(average), tensors_of(model)


def test_copies_of_the_module_get_the_same_values_whole():
    for copied, values in run_ranks(values_of_a_copy, 2):
        assert_same(copied, values)
