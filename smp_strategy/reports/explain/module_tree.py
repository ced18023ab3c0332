"""Module tree of a partition: units as leaves, inner modules with the sums of their units.

Qualified names define the tree. Siblings that are alike (forty blocks of one stage) are a single line of text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

from smp_strategy.planning.partition.partition import PlacedUnit
from smp_strategy.planning.partition.problem import HeldBytes

__all__ = ["ModuleNode", "Row", "abbreviate", "rows_of", "tree_of"]


@final
@dataclass(frozen=True)
class ModuleNode:
    """Module of the tree: a unit, or an inner module with units below."""

    label: str
    """Last part of its name; several parts if the modules in between have a single child."""
    units: tuple[PlacedUnit, ...]
    """Units in it, in execution order."""
    children: "tuple[ModuleNode, ...]" = ()
    """Child modules; empty for a unit."""

    @property
    def seconds(self) -> float:
        """Work of one microbatch."""
        return sum(unit.seconds for unit in self.units)

    @property
    def held(self) -> HeldBytes:
        """Bytes of parameters, gradients and optimizer state; a shared parameter counts in each of its units."""
        return HeldBytes(*map(sum, zip(*(unit.held for unit in self.units), strict=True)))

    @property
    def activation_bytes(self) -> int:
        return sum(unit.activation_bytes for unit in self.units)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({unit.stage for unit in self.units}))


@final
@dataclass(frozen=True)
class Row:
    """Line of the tree as text."""

    depth: int
    label: str
    node: ModuleNode


def tree_of(units: Sequence[PlacedUnit]) -> tuple[ModuleNode, ...]:
    """Outermost modules of the tree above ``units``."""
    return _nodes([(unit.name.split("."), unit) for unit in units])


def rows_of(nodes: Sequence[ModuleNode], depth: int = 0) -> Iterator[Row]:
    """Lines of the tree from top to bottom; adjacent siblings that are alike share one."""
    for _, run in groupby(nodes, _looks):
        alike = list(run)
        label = alike[0].label
        if len(alike) > 1:
            label = f"{alike[0].label} .. {alike[-1].label} ({len(alike)} alike)"
        whole = ModuleNode(label, tuple(unit for node in alike for unit in node.units))
        yield Row(depth, label, whole)
        if len(alike) == 1:
            yield from rows_of(alike[0].children, depth + 1)


def abbreviate(names: Sequence[str]) -> str:
    """Runs of numbered siblings as one entry: ``h.0, h.1, h.2`` becomes ``h.0 .. h.2``."""
    groups: list[list[str]] = []
    for name in names:
        parent, _, last = name.rpartition(".")
        previous = groups[-1][-1].rpartition(".") if groups else ("", "", "")
        if last.isdigit() and previous[2].isdigit() and previous[0] == parent:
            groups[-1].append(name)
        else:
            groups.append([name])
    return ", ".join(group[0] if len(group) == 1 else f"{group[0]} .. {group[-1]}" for group in groups)


def _nodes(named: Sequence[tuple[list[str], PlacedUnit]]) -> tuple[ModuleNode, ...]:
    # A dict, not groupby: modules of one parent need not be executed one after the other.
    groups: dict[str, list[tuple[list[str], PlacedUnit]]] = {}
    for (first, *rest), unit in named:
        groups.setdefault(first, []).append((rest, unit))
    return tuple(_node(first, below) for first, below in groups.items())


def _node(label: str, below: Sequence[tuple[list[str], PlacedUnit]]) -> ModuleNode:
    units = tuple(unit for _, unit in below)
    if not all(rest for rest, _ in below):
        return ModuleNode(label, units)
    children = _nodes(below)
    if len(children) == 1:
        (only,) = children
        return ModuleNode(f"{label}.{only.label}", units, only.children)
    return ModuleNode(label, units, children)


def _looks(node: ModuleNode) -> object:
    """Key that is equal for units that differ only in a number; unique for inner modules."""
    if node.children:
        return id(node)
    (unit,) = node.units
    name = "".join("#" if letter.isdigit() else letter for letter in node.label)
    return name.replace("##", "#"), unit.stage, unit.chunk, unit.held, unit.activation_bytes, unit.work, unit.relief
