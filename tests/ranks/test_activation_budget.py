"""Steps under a budget: the library chooses what units keep, all ranks alike, and the numbers stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.testing import run_ranks
from tests.parity.models import Text, batch_for


def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], Engine]:
    """Losses and weights after three steps with dropout."""
    torch.manual_seed(0)
    model = Text(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(SMPConfig(microbatches=4, pipeline="1f1b", memory_weight=0.0, **options))
    engine.attach(model, [optimizer])
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        done = engine.train_step(model.loss, batch_for("text", step, 8), loss_of=lambda loss: loss)
        done.commit(torch.ones(()), reduce=True)
        optimizer.step()
        losses.append(done.loss.item())
    return losses, engine.saved.full_state_dict(), engine


def memory(engine: Engine) -> list[tuple[int, int]]:
    partition = engine.partition
    assert partition is not None
    return [(stage.held.total, stage.memory_bytes - stage.held.total) for stage in partition.stages]


def within(share: float, pp: int, **options: Any) -> Any:
    """Without a budget, and with one between what everything computed again needs and what everything kept does."""
    losses, weights, free = trained(pipeline_parallel_degree=pp)
    _, _, least = trained(pipeline_parallel_degree=pp, activation_checkpointing="all")
    limits = [
        held + round(low + share * (high - low))
        for (held, high), (_, low) in zip(memory(free), memory(least), strict=True)
    ]
    budget = {"activation_checkpointing": "auto", "memory_limit": tuple(limits)}
    found, others, engine = trained(pipeline_parallel_degree=pp, **budget, **options)
    assert found == losses
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    partition = engine.partition
    assert partition is not None
    assert partition.fits
    assert partition.activation_policies
    assert engine.layout.activation_policies == partition.activation_policies
    return partition.to_json(), str(engine.inspection.explain())


@pytest.mark.dear
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_within_a_budget_the_numbers_are_those_of_everything_kept(pp, share):
    found = run_ranks(within, pp, share, pp)
    assert all(each == found[0] for each in found)
    decided, explained = found[0]
    kinds = {unit["relief"]["treatment"]["recompute"] for unit in json.loads(decided)["units"]}
    assert kinds & {"all", "cheap"}
    assert "Kept for backward" in explained
    assert "keep less for backward" in explained


def offloading() -> None:
    within(0.1, 2, offload_activations=True, offload_min_bytes=0, activation_loading_horizon=1)


def test_host_memory_may_be_chosen_where_the_options_allow_it():
    run_ranks(offloading, 2)


def saved_and_loaded(path: str) -> None:
    losses, _, free = trained(pipeline_parallel_degree=2)
    _, _, least = trained(pipeline_parallel_degree=2, activation_checkpointing="all")
    high, low = (max(held + kept for held, kept in memory(engine)) for engine in (free, least))
    auto = {"pipeline_parallel_degree": 2, "activation_checkpointing": "auto", "partition_file": path}
    _, _, first = trained(**auto, memory_limit=(low + high) // 2)
    # With room for everything the file's choice counts all the same.
    found, _, second = trained(**auto, load_partition=True, memory_limit=10 * high)
    assert first.partition is not None
    assert second.partition is not None
    assert first.partition.activation_policies == second.partition.activation_policies != {}
    assert found == losses


def test_a_file_keeps_the_choice(tmp_path: Path):
    run_ranks(saved_and_loaded, 2, str(tmp_path / "partition.json"))


def without_limit() -> None:
    trained(pipeline_parallel_degree=1, activation_checkpointing="auto")


def too_little() -> None:
    trained(pipeline_parallel_degree=1, activation_checkpointing="auto", memory_limit=1000)


def test_without_a_limit_there_is_nothing_to_choose_for():
    with pytest.raises(RuntimeError, match="`activation_checkpointing=auto` computes again what `memory_limit` makes"):
        run_ranks(without_limit, 1)


def test_if_nothing_fits_it_is_said_what_would():
    with pytest.raises(RuntimeError, match=r"No partition fits `memory_limit`: [\d,]+ bytes are needed") as failure:
        run_ranks(too_little, 1)
    assert ConfigError.__name__ in str(failure.value)
