"""Decisions on a module before the first step, and the modules above its units."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.layout import Layout
from smp_strategy.model.units import choose_units

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)


def layout_of(module: nn.Module, **options: Any) -> Layout:
    mesh: Any = SimpleNamespace(tp_group=None)
    return Layout.undecided(SMPConfig(**options), module, choose_units(module, 2), mesh, CPU, None)


def test_nothing_is_decided_before_the_first_step_but_what_the_options_say():
    layout = layout_of(Net(), activation_checkpointing="all")
    assert (layout.partition, layout.split_report) == (None, None)
    assert not layout.split.cuts
    assert layout.num_parameters["first"] == 4 * 8 + 8
    assert {"first", "second"} <= set(layout.activation_policies)
    assert not layout_of(Net()).activation_policies


def test_modules_above_the_units_are_glue_but_for_those_that_microbatches_share():
    net = Net()
    parts = EngineParts(SMPConfig(), CPU, None, lambda text: None)
    parts.known_layout = layout_of(net)
    inside = {part for unit in parts.known_layout.units for part in unit.module.modules()}
    assert parts.glue() == [part for part in net.modules() if part not in inside]
    assert net in parts.glue()
    parts.keep_shared = [net]
    assert net not in parts.glue()
