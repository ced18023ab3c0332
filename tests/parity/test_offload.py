"""What units keep goes to the host and comes back, and all numbers are those of one process, bit for bit."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine

from . import (
    test_additions,
    test_architectures,
    test_collected,
    test_control_flow,
    test_interfaces,
    test_operations,
    test_sequence_models,
)
from .compare import STEPS, WIDTH, Block, Blocks, Case, Outcome, _batch, _start, check, in_order, pipeline
from .test_sharded import sharded

OFFLOAD = {"offload_activations": True, "offload_min_bytes": 0, "activation_loading_horizon": 1}
SCHEDULES = {
    "simple": {"pipeline": "simple"},
    "1f1b": {"pipeline": "1f1b"},
    "1f1b, 2 chunks": {"pipeline": "1f1b", "virtual_pipeline_degree": 2},
    "interleaved, 2 chunks": {"pipeline": "interleaved", "virtual_pipeline_degree": 2},
    "zb-h1": {"pipeline": "zb-h1"},
    "zb-h2": {"pipeline": "zb-h2"},
    "zb-v": {"pipeline": "zb-v"},
}
RECOMPUTED = {
    "each": {"activation_checkpointing": "all"},
    "contiguous": {"activation_checkpointing": "all", "checkpoint_strategy": "contiguous"},
    "selective": {"activation_checkpointing": "all", "selective_checkpointing": True},
}


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.norm(x)), 0.3, self.training)


class Attending(Block):
    """Gets a mask that all blocks share, and saves views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores * mask
        return x + self.mlp(scores.softmax(-1) @ v)


def masked(net: Any, x: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(len(x), len(x))) + x.detach() @ x.detach().t()
    for block in net.blocks:
        x = block(x, mask=mask)
    return x.pow(2).mean()


def with_options(case: Case, **options: Any) -> Case:
    return Case(case.make, case.differs, case.draws, {**case.options, **options})


def offloading(case: Case, pp: int, counts: Iterable[int]) -> list[Outcome]:
    """On a rank: as :func:`~.compare.pipeline`; something must have gone out wherever it has to."""
    found = []
    for microbatches in counts:
        module, optimizer = _start(case)
        engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=microbatches, **case.options))
        engine.attach(module, [optimizer])
        losses, traffic = [], []
        for step in range(STEPS):
            result = engine.train_step(module.loss, _batch(module, step), loss_of=lambda loss: loss)
            optimizer.zero_grad()
            result.commit(torch.ones(()), reduce=True)
            optimizer.step()
            losses += [loss.item() for loss in result.outputs]
            traffic.append(engine.inspection.traffic)
        if pp > 1 and microbatches == 1:  # needed at once
            assert not any(each.bytes_out for each in traffic)
        elif engine.mesh.stage < pp - 1 or pp == 1:
            assert all(each.bytes_out for each in traffic)
        assert not any(each.num_late for each in traffic)
        found.append(Outcome(losses, list(getattr(module, "seen", ())), engine.saved.full_state_dict()))
        engine.close()
    return found


BLOCKS = {
    "plain": Case(lambda: Blocks(in_order)),
    "dropout": Case(lambda: Blocks(in_order, Dropping), draws=True),
    "attention with a shared mask": Case(lambda: Blocks(masked, Attending)),
}


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("name", BLOCKS)
def test_numbers_are_those_without_offload(name: str, pp: int) -> None:
    check(with_options(BLOCKS[name], **OFFLOAD, pipeline="simple"), pp, (1, 4), offloading)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_are_those_without_offload_under_every_schedule(schedule: str) -> None:
    check(Case(lambda: Blocks(masked, Attending), options={**OFFLOAD, **SCHEDULES[schedule]}), 2, (4,))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("strategy", RECOMPUTED)
def test_inputs_of_units_that_are_computed_again_go_out(strategy: str, pp: int) -> None:
    case = with_options(BLOCKS["dropout"], **OFFLOAD, pipeline="simple", **RECOMPUTED[strategy])
    # Of a whole group only the input of the first unit is kept, and that may be the batch.
    check(case, pp, (4,), pipeline if strategy == "contiguous" else offloading)


CASES = {
    name: table[name]
    for table, names in (
        (test_architectures.CASES, ["u-net", "resnet", "cumulative batch statistics"]),
        (test_sequence_models.CASES, ["albert", "packed sequences", "mixture of experts"]),
        (test_control_flow.STEPS, ["several_passes", "with_autocast"]),
        (test_interfaces.STEPS, ["complex numbers", "functional_call", "weights by name"]),
        (test_additions.CASES, ["spectral_norm", "orthogonal", "checkpoint of glue", "hook on a unit's backward"]),
        (test_additions.CASES, ["TorchScript", "gradient reversal", "adapters"]),
        (test_operations.STEPS, ["in_place", "products"]),
        (test_collected.ATTRIBUTES, ["a sum over calls"]),
    )
    for name in names
}
IN_SHARDS = ["u-net", "albert", "weights by name", "adapters", "mixture of experts", "in_place"]


@pytest.mark.parametrize("name", CASES)
def test_models_of_all_kinds_have_the_numbers_of_one_process(name: str) -> None:
    check(with_options(CASES[name], **OFFLOAD), 2, (4,))


@pytest.mark.parametrize("name", IN_SHARDS)
def test_two_stages_of_two_shards_have_the_numbers_of_one_process(name: str) -> None:
    check(with_options(CASES[name], **OFFLOAD), 4, (4,), sharded)


def test_a_shard_of_one_stage_has_the_numbers_of_one_process() -> None:
    check(with_options(BLOCKS["plain"], **OFFLOAD), 2, (1,), sharded)
