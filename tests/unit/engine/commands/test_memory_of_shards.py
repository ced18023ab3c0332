"""Options that `memory_limit` chooses for shards."""

from typing import Any

import pytest
import torch

from smp_strategy import plan_partition
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.decide import chosen_for_memory
from smp_strategy.errors import ConfigError
from smp_strategy.planning.partition.partition import Partition
from tests.parity.models import MODELS, batch_for

torch.manual_seed(0)
MODEL = MODELS["text"]()
# Elements of a block, the largest unit, with padding.
LARGEST = 1152


def plan(**options: Any) -> Partition:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    shards = {"sharded_data_parallel_degree": 2, **options}
    return plan_partition(MODEL, MODEL.loss, batch_for("text", 0, 4), num_stages=1, optimizers=[optimizer], **shards)


def needed(**options: Any) -> int:
    return plan(**options).stages[0].memory_bytes


def test_what_fits_gathers_ahead_and_keeps_all_activations():
    partition = plan(memory_limit=needed())
    assert partition.most_live is None
    assert not partition.activation_policies
    assert chosen_for_memory(SMPConfig(memory_limit=needed()), partition) == ""


def test_first_no_unit_is_gathered_ahead():
    everything, alone = needed(), needed(sdp_max_live_parameters=LARGEST)
    assert 0 < everything - alone <= 4 * LARGEST
    config = SMPConfig(memory_limit=everything - 1, sharded_data_parallel_degree=2)
    partition = plan(memory_limit=everything - 1)
    assert (partition.most_live, partition.stages[0].memory_bytes) == (LARGEST, alone)
    assert not partition.activation_policies
    said = chosen_for_memory(config, partition)
    assert said.startswith("To stay within the memory limit of ")
    assert f"no unit is gathered ahead of its use (`sdp_max_live_parameters={LARGEST}`): " in said


def test_then_units_compute_activations_again():
    alone = needed(sdp_max_live_parameters=LARGEST)
    partition = plan(memory_limit=alone - 1)
    assert partition.most_live == LARGEST
    assert partition.stages[0].memory_bytes < alone
    relieved = len(partition.activation_policies)
    assert 0 < relieved < len(partition.units)
    config = SMPConfig(memory_limit=alone - 1, sharded_data_parallel_degree=2)
    assert f"and {relieved} of 9 units compute activations again" in chosen_for_memory(config, partition)


@pytest.mark.parametrize(
    ("options", "most_live"),
    [({"sdp_max_live_parameters": 10**6}, None), ({"activation_checkpointing": "blocks.0"}, LARGEST)],
)
def test_options_of_the_user_stay(options, most_live):
    partition = plan(memory_limit=needed(**options) - 1, **options)
    assert partition.most_live == most_live
    if "activation_checkpointing" in options:
        assert list(partition.activation_policies) == ["blocks.0"]


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "all", "sdp_max_live_parameters": LARGEST}])
def test_what_fits_under_no_options_is_refused(options):
    with pytest.raises(ConfigError, match=r"No partition fits `memory_limit`: .* of 50,000"):
        plan(memory_limit=50_000, **options)
