"""Recomputed and offloaded activations of an explanation: sentences, and rows of a table."""

from collections.abc import Sequence
from itertools import groupby

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.config.sizes import show_bytes, show_count, show_seconds
from smp_strategy.planning.partition.partition import Partition, PlacedUnit, StageLoad
from smp_strategy.reports.explain.module_tree import abbreviate

__all__ = ["RELIEF_CAPTION", "RELIEF_COLUMNS", "name_of", "relief_lines", "relief_rows"]

RELIEF_COLUMNS = ("stage", "units", "what becomes of it", "on the device", "spared", "on the host", "time")
RELIEF_CAPTION = (
    "of what each unit keeps for the backward of one microbatch; time: that its forward and backward take longer"
)
_NAMES = {
    ("no", False): "kept",
    ("no", True): "in host memory",
    ("cheap", False): "products kept, the rest computed again",
    ("cheap", True): "inputs in host memory, products kept, the rest computed again",
    ("all", False): "inputs kept, the rest computed again",
    ("all", True): "inputs in host memory, the rest computed again",
}


def name_of(policy: ActivationPolicy) -> str:
    return _NAMES[policy.recompute, policy.offload]


def relief_lines(partition: Partition) -> list[str]:
    """Memory saved and time added on each stage, a line each; empty if all units keep everything."""
    if not partition.activation_policies:
        return []
    return [_line(partition, number, stage) for number, stage in enumerate(partition.stages)]


def _line(partition: Partition, number: int, stage: StageLoad) -> str:
    units = [unit for unit in partition.units if unit.stage == number]
    relieved = [unit for unit in units if not unit.relief.treatment.is_default]
    if not relieved:
        return f"Stage {number}: units keep everything for backward, {show_bytes(stage.activation_bytes)} at the peak."
    added = sum(unit.relief.seconds for unit in relieved) / (sum(sum(unit.work) for unit in units) or 1.0)
    before = "" if stage.all_kept_bytes is None else f" instead of {show_bytes(stage.all_kept_bytes)}"
    limit = stage.memory_limit
    room = "" if limit is None else f", there is room for {show_bytes(max(0, limit - stage.held.total))}"
    return (
        f"Stage {number}: {len(relieved)} of {show_count(len(units), 'unit')} keep less for backward, "
        f"{show_bytes(stage.activation_bytes)} at the peak{before}{room}; its work takes {added:.1%} longer."
    )


def relief_rows(partition: Partition) -> list[tuple[str, ...]]:
    """Rows of units in execution order; adjacent units with the same policy share a row."""
    if not partition.activation_policies:
        return []
    return [_row(list(run)) for _, run in groupby(partition.units, lambda unit: (unit.stage, unit.relief.treatment))]


def _row(units: Sequence[PlacedUnit]) -> tuple[str, ...]:
    spared = sum(unit.relief.spared_bytes for unit in units)
    on_host = sum(unit.relief.offloaded_bytes for unit in units)
    seconds = sum(unit.relief.seconds for unit in units)
    return (
        str(units[0].stage),
        abbreviate([unit.name for unit in units]),
        name_of(units[0].relief.treatment),
        show_bytes(sum(unit.activation_bytes for unit in units)),
        show_bytes(spared) if spared else "",
        show_bytes(on_host) if on_host else "",
        f"+ {show_seconds(seconds)}" if seconds else "",
    )
