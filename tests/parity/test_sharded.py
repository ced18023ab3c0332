"""Cases of the other files with their parameters spread over shard groups: the numbers of one process.

Both replicas read the same batch, so the mean of their gradients is the gradient, bit for bit, and cases need no
second description.
"""

from collections.abc import Iterable

import pytest
import torch

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

from . import (
    test_additions,
    test_architectures,
    test_collected,
    test_control_flow,
    test_interfaces,
    test_operations,
    test_sequence_models,
)
from .compare import STEPS, Blocks, Case, Outcome, _batch, _start, check, in_order

SHARDS = 2


def sharded(case: Case, ranks: int, counts: Iterable[int]) -> list[Outcome]:
    """On a rank: :func:`~.compare.pipeline` with two shards of each stage."""
    found = []
    for microbatches in counts:
        module, optimizer = _start(case)
        degrees = {"pipeline_parallel_degree": ranks // SHARDS, "sharded_data_parallel_degree": SHARDS}
        engine = Engine(SMPConfig(**degrees, microbatches=microbatches, **case.options))
        engine.attach(module, [optimizer])
        losses = []
        for step in range(STEPS):
            result = engine.train_step(module.loss, _batch(module, step), loss_of=lambda loss: loss, reduces=True)
            optimizer.zero_grad()
            result.commit(torch.ones(()), reduce=True)
            engine.begin_update(optimizer)
            optimizer.step()
            engine.end_update(optimizer)
            losses += [loss.item() for loss in result.outputs]
        found.append(Outcome(losses, list(getattr(module, "seen", ())), engine.saved.full_state_dict()))
        engine.close()
    return found


CASES = {
    name: table[name]
    for table, names in (
        (test_architectures.CASES, ["u-net", "resnet", "class token", "two towers", "cumulative batch statistics"]),
        (test_sequence_models.CASES, ["albert", "nn.Transformer", "packed sequences", "mixture of experts"]),
        (test_control_flow.STEPS, ["several_passes", "with_autocast", "modes"]),
        (test_control_flow.NETWORKS, ["target network"]),
        (test_interfaces.STEPS, ["complex numbers", "other methods", "weights by name", "functional_call"]),
        (test_interfaces.CONTAINERS, ["chosen by the batch", "lazy modules"]),
        (test_additions.CASES, ["hooks on weights", "adapters", "spectral_norm", "orthogonal", "checkpoint of glue"]),
        (test_additions.CASES, ["hook on a unit's backward", "TorchScript", "gradient reversal"]),
        (test_additions.MODELS, ["LoRA on GPT-2"]),
        (test_operations.STEPS, ["in_place", "products"]),
        (test_collected.ATTRIBUTES, ["a hook inside fills a dict above", "a sum over calls"]),
    )
    for name in names
}
IN_STAGES = ["u-net", "albert", "weights by name", "adapters", "checkpoint of glue", "mixture of experts", "in_place"]
SCHEDULES = {
    "simple": {"pipeline": "simple"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved, 2 chunks": {"pipeline": "interleaved", "virtual_pipeline_degree": 2},
    "zb-h1": {"pipeline": "zb-h1"},
    "zb-v": {"pipeline": "zb-v"},
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # of transformers, within itself and peft
@pytest.mark.parametrize("name", CASES)
def test_two_shards_have_the_numbers_of_one_process(name: str) -> None:
    check(CASES[name], SHARDS, (1,), sharded)


@pytest.mark.parametrize("name", IN_STAGES)
def test_two_stages_of_two_shards_have_the_numbers_of_one_process(name: str) -> None:
    check(CASES[name], 2 * SHARDS, (4,), sharded)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shards_have_the_numbers_of_one_process_under_every_schedule(schedule: str) -> None:
    check(Case(lambda: Blocks(in_order), options=SCHEDULES[schedule]), 2 * SHARDS, (4,), sharded)


def test_transforms_inside_of_a_sharded_unit_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        RuntimeError, match=r"`blocks\.0` is a unit whose weights are spread over ranks.*autograd\.grad"
    ):
        run_ranks(sharded, 2, test_interfaces.STEPS["torch.func"], 2, (1,))
