"""SageMaker's tree partitioning (arXiv:2111.05972, algorithms 1 to 3): a baseline, and a start of the search.

The algorithm walks down the tree of modules. A module with several devices cuts its children, in execution order, into
as many contiguous segments as it can, minimizing the most expensive one; D'Hondt's rule assigns the devices to the
segments, as seats in a parliament; then each segment is partitioned recursively. The cost of a module is
``a * M + (1 - a) * T``, its shares in the memory and the work of the model. Modules that share parameters are one.

The paper leaves units and ties open. Here memory is all held bytes and the activations of a microbatch, a segment never
gets more devices than it has leaves (otherwise a large embedding takes devices that it cannot use), and stages are
numbered in execution order afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from smp_strategy.planning.partition.problem import HeldBytes, UnitCost

__all__ = ["PartitionNode", "d_hondt", "in_execution_order", "module_tree", "segments", "tree_partition"]


@final
@dataclass(frozen=True)
class PartitionNode:
    """Node of the module tree: a leaf with one unit, or several that share parameters, or a group of nodes."""

    name: str
    units: tuple[str, ...] = ()
    """Units of a leaf."""
    memory: float = 0.0
    work: float = 0.0
    children: tuple["PartitionNode", ...] = ()

    @property
    def num_leaves(self) -> int:
        """Number of leaves below the node; 1 for a leaf."""
        return sum(child.num_leaves for child in self.children) if self.children else 1

    def cost(self, root: "PartitionNode", memory_weight: float) -> float:
        """C(n) of the paper: weighted share of the node in ``root``."""
        memory, work = self.memory / (root.memory or 1.0), self.work / (root.work or 1.0)
        return memory_weight * memory + (1 - memory_weight) * work


def module_tree(units: Sequence[UnitCost]) -> PartitionNode:
    """Tree of the modules above ``units``, by qualified names, in execution order."""
    return _tree("", [(leaf.name.split("."), leaf) for leaf in _leaves(units)])


def tree_partition(root: PartitionNode, num_devices: int, memory_weight: float) -> dict[str, int]:
    """Stage of each unit (algorithm 1).

    Args:
        root: Root of the module tree.
        num_devices: Number of stages; at most the number of leaves.
        memory_weight: Weight of memory against work, 0 to 1.
    """
    device_of: dict[str, int] = {}
    waiting: list[tuple[PartitionNode, Sequence[int]]] = [(root, range(num_devices))]
    while waiting:
        node, devices = waiting.pop(0)
        device_of.update(dict.fromkeys(node.units, devices[0]))
        if len(devices) == 1:
            waiting += [(child, devices) for child in node.children]
        elif node.children:
            costs = {id(child): child.cost(root, memory_weight) for child in node.children}
            waiting += _shared_out(list(node.children), devices, costs)
    return device_of


def segments(costs: Sequence[float], count: int) -> list[int]:
    """First entry of each of ``count`` contiguous segments with the smallest largest sum (equation 3)."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for number in range(1, count + 1):
        best = {
            end: min(
                (max(worst, total[end] - total[begin]), [*starts, begin])
                for begin, (worst, starts) in best.items()
                if begin < end
            )
            for end in range(number, len(costs) - count + number + 1)
        }
    return best[len(costs)][1]


def d_hondt(costs: Sequence[float], num_devices: int, most: Sequence[int] | None = None) -> list[list[int]]:
    """Devices of each segment by D'Hondt's rule: every device goes to the segment with the largest cost per device.

    Args:
        costs: Costs of the segments.
        num_devices: Number of devices.
        most: Most devices of each segment; ``None``: unlimited.
    """
    given: list[list[int]] = [[] for _ in costs]
    for device in range(num_devices):
        able = [k for k in range(len(costs)) if most is None or len(given[k]) < most[k]]
        given[max(able, key=lambda k: costs[k] / (len(given[k]) + 1))].append(device)
    return given


def _shared_out(
    nodes: list[PartitionNode], devices: Sequence[int], costs: Mapping[int, float]
) -> list[tuple[PartitionNode, Sequence[int]]]:
    """Devices of each of the children ``nodes`` (algorithm 2)."""
    starts = segments([costs[id(node)] for node in nodes], min(len(devices), len(nodes)))
    parts = [nodes[begin:end] for begin, end in zip(starts, [*starts[1:], len(nodes)], strict=True)]
    seats = d_hondt(
        [sum(costs[id(node)] for node in part) for part in parts],
        len(devices),
        [sum(node.num_leaves for node in part) for part in parts],
    )
    found: list[tuple[PartitionNode, Sequence[int]]] = []
    for part, numbers in zip(parts, seats, strict=True):
        mine = [devices[number] for number in numbers] or [devices[0]]
        if len(part) == 1 or len(mine) == 1:
            found += [(node, mine) for node in part]
        else:
            found += _shared_out(part, mine, costs)
    return found


def _leaves(units: Sequence[UnitCost]) -> list[PartitionNode]:
    """Leaves of the tree: units that share parameters are one leaf, at the place of the first of them."""
    groups: list[list[UnitCost]] = []
    for unit in units:
        related = [group for group in groups if any(unit.parameters.keys() & other.parameters for other in group)]
        if not related:
            groups.append([unit])
            continue
        related[0] += [*(other for group in related[1:] for other in group), unit]
        groups = [group for group in groups if not any(group is late for late in related[1:])]
    leaves = []
    for group in groups:
        parameters: dict[int, HeldBytes] = {}
        for unit in group:
            parameters.update(unit.parameters)
        leaves.append(
            PartitionNode(
                group[0].name,
                tuple(unit.name for unit in group),
                sum(held.total for held in parameters.values()) + sum(unit.activation_bytes for unit in group),
                sum(sum(unit.work) for unit in group),
            )
        )
    return leaves


def _tree(name: str, leaves: Sequence[tuple[list[str], PartitionNode]]) -> PartitionNode:
    groups: dict[str, list[tuple[list[str], PartitionNode]]] = {}
    for path, leaf in leaves:
        groups.setdefault(path[0], []).append((path[1:], leaf))
    children = [
        replace(below[0][1], name=part) if len(below) == 1 and not below[0][0] else _tree(part, below)
        for part, below in groups.items()
    ]
    return PartitionNode(
        name,
        memory=sum(child.memory for child in children),
        work=sum(child.work for child in children),
        children=tuple(children),
    )


def in_execution_order(stage_of: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """Stages renumbered in the order of their first units among ``names``."""
    number: dict[int, int] = {}
    for name in names:
        number.setdefault(stage_of[name], len(number))
    return {name: number[stage] for name, stage in stage_of.items()}
