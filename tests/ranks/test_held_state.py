"""What ranks say that they hold is the state of one process, and is loaded under any layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.checkpoint.full_state_dict import collect
from smp_strategy.checkpoint.sources import WholeState, flattened
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.model.ownership import home_of
from smp_strategy.testing import run_ranks

# Ranks, and options.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "pp4": (4, {"pipeline_parallel_degree": 4}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "sdp4_small_gathered": (4, {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 20}),
    "mics2x2": (4, {"sharded_data_parallel_degree": 2}),
    "mics2x2_dealt": (4, {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True}),
    "sdp2_bf16": (2, {"sharded_data_parallel_degree": 2, "bf16": True}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "tp2_sdp2": (4, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "pp2_sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "zero1": (2, {"shard_optimizer_state": True}),
}
# Half precision has other values.
EXACT = [name for name in LAYOUTS if not name.endswith("bf16")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.kernel = nn.Parameter(torch.ones(2, 3, 4).permute(2, 0, 1).contiguous().permute(1, 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.gain + self.kernel.square().sum() * 0.01


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def start(layout: str, seed: int = 0) -> tuple[Model, torch.optim.Optimizer, Engine]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)  # gradients of key biases are noise
    engine = Engine(SMPConfig(**{"pipeline_parallel_degree": 1, "microbatches": 1, **LAYOUTS[layout][1]}))
    engine.attach(model, [optimizer])
    return model, optimizer, engine


def train(model: Model, optimizer: torch.optim.Optimizer, engine: Engine, steps: range) -> None:
    for number in steps:
        # The same samples for all replicas, so that any number of them computes alike.
        tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        step = engine.train_step(model.loss, tokens, loss_of=lambda loss: loss)
        step.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)


def whole(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ranks hold, put together by hand on rank 0."""
    return collect(flattened(engine.saved.held_state([optimizer])))


def saved(layout: str) -> Any:
    model, optimizer, engine = start(layout)
    train(model, optimizer, engine, range(2))
    held = flattened(engine.saved.held_state([optimizer]))
    numel = sum(block.tensor.numel() for each in held.values() if isinstance(each, HeldTensor) for block in each.blocks)
    return whole(engine, optimizer), numel


def resumed(layout: str, state: dict[str, Any], *, late: bool) -> Any:
    model, optimizer, engine = start(layout, seed=1)
    if late:
        train(model, optimizer, engine, range(5, 6))
    source = WholeState(state)
    engine.saved.load_stored(source)
    engine.saved.load_stored_optimizer(source, 0, optimizer)
    before = whole(engine, optimizer)
    train(model, optimizer, engine, range(2, 4))
    return before, whole(engine, optimizer)


def assert_same(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert found[name] == value


@pytest.fixture(scope="module")
def uninterrupted() -> Any:
    def states() -> Any:
        model, optimizer, engine = start("single")
        train(model, optimizer, engine, range(2))
        first = whole(engine, optimizer)
        train(model, optimizer, engine, range(2, 4))
        return first, whole(engine, optimizer)

    return run_ranks(states, 1)[0]


@pytest.mark.parametrize("layout", EXACT)
def test_what_ranks_hold_is_the_state_of_one_process(layout, uninterrupted):
    ranks = LAYOUTS[layout][0]
    (found, _), *_ = results = run_ranks(saved, ranks, layout)
    assert_same(found, uninterrupted[0], rtol=1e-3, atol=1e-5)
    if "sdp" in layout:
        everything = sum(value.numel() for value in found.values() if isinstance(value, Tensor))
        assert max(numel for _, numel in results) < 0.7 * everything


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("layout", EXACT)
def test_each_layout_goes_on_with_it(layout, late, uninterrupted):
    first, last = uninterrupted
    before, after = run_ranks(resume, LAYOUTS[layout][0], layout, first, late)[0]
    assert_same(before, first, rtol=0, atol=0)
    assert_same(after, last, rtol=1e-3, atol=1e-5)


def resume(layout: str, state: dict[str, Any], late: bool) -> Any:
    return resumed(layout, state, late=late)


def test_masters_are_saved_and_loaded_where_units_compute_in_half_precision(uninterrupted):
    before, _ = run_ranks(resume, 2, "sdp2_bf16", uninterrupted[0], True)[0]
    assert_same(before, uninterrupted[0], rtol=0, atol=0)


class Remembering(nn.Linear):
    """Has a state that is no parameter: a tensor, or a dict."""

    def __init__(self, memory: Any) -> None:
        super().__init__(4, 4)
        self.memory = memory

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


def remembering(memories: list[Any]) -> tuple[nn.Sequential, Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Remembering(memory)) for memory in memories))
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=1, unit_classes=("Remembering",)))
    engine.attach(model)
    return model, engine


def one_step(model: nn.Module, engine: Engine) -> None:
    engine.train_step(lambda x: model(x).sum(), torch.ones(2, 4), loss_of=lambda loss: loss)


def remembered(state: dict[str, Any] | None, *, late: bool = False) -> Any:
    """What modules remember, as files have it; or what is loaded of that, where it is used."""
    memories = [torch.arange(3.0), {"seen": 2, "scale": torch.ones(2)}, torch.tensor(7), {"seen": 5}]
    model, engine = remembering(memories if state is None else [None, None, None, None])
    if state is None or late:
        one_step(model, engine)
    if state is None:
        for unit in model:  # only those that run here know the latest
            if home_of(unit[0].weight) is None:
                unit[0].memory = (unit[0].memory, "latest") if isinstance(unit[0].memory, dict) else unit[0].memory + 1
        return collect(flattened(engine.saved.held_state([])))
    engine.saved.load_stored(WholeState(state))
    return [unit[0].memory for unit in model]


def load_remembered(state: dict[str, Any], late: bool) -> Any:
    return remembered(state, late=late)


@pytest.mark.parametrize("late", [False, True])
def test_extra_states_are_those_of_the_stage_that_uses_them(late):
    saved = run_ranks(remembered, 2, None)[0]
    for found in run_ranks(load_remembered, 2, saved, late):
        assert torch.equal(found[0], torch.arange(3.0) + 1)
        assert torch.equal(found[2], torch.tensor(8))
        assert found[3] == ({"seen": 5}, "latest")
        assert found[1][0]["seen"] == 2
        assert found[1][1] == "latest"
