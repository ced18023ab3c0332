"""``activation_checkpointing="auto"`` under the Trainer: the bits of everything kept in every layout, within limits."""

import itertools
from typing import NamedTuple

import pytest
import torch
from lightning_toy import CLASSES, FEATURES, on_ranks, toy_loader, toy_module, toy_trainer
from torch import nn

from smp_strategy.planning.partition.partition import Partition

WIDTH, MICROBATCHES = 16, 4
PP2 = {"pipeline_parallel_degree": 2}
TP2 = {"tensor_parallel_degree": 2, "tensor_parallel": {"*.mlp.0": "column", "*.mlp.2": "row"}}
SDP2 = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
HALF, LATE = {"bf16": True}, {"delayed_parameter_initialization": True}
LAYOUTS = {
    "1 stage": (1, {}),
    "2 stages": (2, PP2),
    "2 parts": (2, TP2),
    "2 parts of 2 stages": (4, {**PP2, **TP2}),
    "2 shards, gathered for each use": (2, {**SDP2, "sdp_gather": "use"}),
    "2 shards, gathered for a step": (2, {**SDP2, "sdp_gather": "step"}),
    "2 shards of 2 stages": (4, {**PP2, **SDP2}),
    "2 stages in half precision, with values that come late": (2, {**PP2, **HALF, **LATE}),
    "2 parts in half precision, with values that come late": (2, {**TP2, **HALF, **LATE}),
    "2 shards in half precision, with values that come late": (2, {**SDP2, **HALF, **LATE}),
}
LITTLE = {"use_distributed_sampler": False, "limit_train_batches": 3, "limit_val_batches": 1}
# Runs of blocks' code on this rank. Not in an attribute: running a block again puts these back.
RUNS = itertools.count()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        next(RUNS)
        return x + self.dropout(self.mlp(self.norm(x)))


def configure_model(self):
    if not hasattr(self, "is_built"):
        blocks = (Block() for _ in range(6))
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))
        self.is_built = True


class Run(NamedTuple):
    weights: dict[str, torch.Tensor]
    partition: Partition
    explained: str
    runs: int
    """Of the code of blocks, on this rank."""


def fit(folder, **smp):
    before = next(RUNS)
    module = toy_module(configure_model=configure_model)
    defaults = {"pipeline_parallel_degree": 1, "microbatches": MICROBATCHES, "memory_weight": 0.0}
    trainer = toy_trainer(folder, smp={**defaults, **smp}, max_epochs=1, **LITTLE)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    trainer.save_checkpoint(folder / "end.ckpt")
    partition = trainer.strategy.engine.partition
    assert trainer.strategy.engine.layout.activation_policies == partition.activation_policies
    said = str(trainer.strategy.explain())
    weights = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    return Run(weights, partition, said, next(RUNS) - before)


def limits_between(folder, share, smp):
    """Bytes for each stage, between what everything computed again needs and what everything kept does."""
    kept, again = fit(folder / "kept", **smp), fit(folder / "again", **smp, activation_checkpointing="all")
    assert_same(again.weights, kept.weights)
    return (
        kept,
        again,
        tuple(
            round(less.memory_bytes + share * (more.memory_bytes - less.memory_bytes))
            for less, more in zip(again.partition.stages, kept.partition.stages, strict=True)
        ),
    )


def within(folder, smp):
    kept, again, limits = limits_between(folder, 0.1, smp)
    auto = fit(folder / "auto", **smp, activation_checkpointing="auto", memory_limit=limits)
    assert_same(auto.weights, kept.weights)
    stages = auto.partition.stages
    assert tuple(stage.memory_limit for stage in stages) == limits
    assert all(stage.memory_bytes <= stage.memory_limit for stage in stages)
    assert any(policy.recompute != "no" for policy in auto.partition.activation_policies.values())
    assert "keep less for backward" in auto.explained
    return auto.partition.to_json(), kept.runs, auto.runs, again.runs


def assert_same(found, expected):
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_the_choice_has_the_bits_of_everything_kept_within_the_limit(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    found = on_ranks(within, ranks, tmp_path, smp)
    assert {decided for decided, *_ in found} == {found[0][0]}
    runs, found_runs, most_runs = (sum(each[number] for each in found) for number in (1, 2, 3))
    assert runs < found_runs <= most_runs


def saved_and_loaded(folder, smp):
    kept, _, limits = limits_between(folder, 0.1, smp)
    auto = {**smp, "activation_checkpointing": "auto", "partition_file": str(folder / "partition.json")}
    first = fit(folder / "first", **auto, memory_limit=limits)
    # With room for everything the choice of the file counts all the same.
    second = fit(folder / "second", **auto, load_partition=True, memory_limit="1GiB")
    assert first.partition.activation_policies == second.partition.activation_policies != {}
    assert first.runs == second.runs
    assert_same(second.weights, kept.weights)
    return second.partition.to_json()


@pytest.mark.dear
@pytest.mark.parametrize(
    "layout",
    ["2 stages in half precision, with values that come late", "2 parts", "2 shards, gathered for each use"],
)
def test_a_run_takes_over_what_another_has_chosen(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    found = on_ranks(saved_and_loaded, ranks, tmp_path, smp)
    assert set(found) == {found[0]}
