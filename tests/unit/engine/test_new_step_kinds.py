"""What is refused, and what is found out, before the first step of a kind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.layout import Layout
from smp_strategy.engine.new_step_kinds import needs_look, refuse_rescaled, refuse_rewritten
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.units import choose_units

CPU = torch.device("cpu")


def parts_of(module: nn.Module, *, replicas: int = 1, shards: bool = False) -> EngineParts:
    """Parts of an engine on a mesh without processes, before the first step."""
    config = SMPConfig()
    parts = EngineParts(config, CPU, None, lambda text: None)
    mesh: Any = SimpleNamespace(pp=1, dp=replicas, tp_group=None, shard_group=object() if shards else None)
    parts.known_mesh = mesh
    parts.known_layout = Layout.undecided(config, module, choose_units(module, 2), mesh, CPU, None)
    return parts


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), nn.Linear(4, 4), nn.Linear(4, 7))


def test_replicas_refuse_to_rescale_rows_each_in_its_own_way():
    with pytest.raises(UnsupportedError, match="`0.weight` is rescaled as it is used .* but 2 replicas"):
        refuse_rescaled(parts_of(words(), replicas=2))
    refuse_rescaled(parts_of(words()))
    refuse_rescaled(parts_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), replicas=2))


def test_weights_that_units_write_to_are_refused_in_shards():
    parts = parts_of(words(), shards=True)
    refuse_rewritten(parts)
    parts.layout.shape_inference.rewritten.update({"1.weight", "2.weight"})
    with pytest.raises(UnsupportedError, match="`1.weight` and 1 more is written to by its own layer"):
        refuse_rewritten(parts)
    parts = parts_of(words())
    parts.layout.shape_inference.rewritten.add("1.weight")
    refuse_rewritten(parts)


def test_a_kind_is_looked_at_where_it_may_reach_what_a_rank_has_in_part():
    assert needs_look(parts_of(words().train()))
    assert not needs_look(parts_of(words().eval()))
    parts = parts_of(words().eval())
    parts.layout.group = TensorGroup(None, size=2)
    assert needs_look(parts)
