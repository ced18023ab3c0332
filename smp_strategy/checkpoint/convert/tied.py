"""Further names of tied weights, which files for exchange leave out and a module wants to find.

Hugging Face saves ``shared.weight`` only; the state dict of the module has it as ``lm_head.weight``, too.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from smp_strategy.checkpoint.convert.contents import LazyTensor

__all__ = ["add_tied"]


def add_tied(weights: dict[str, Any], like: Mapping[str, LazyTensor]) -> list[str]:
    """Add the names to ``weights`` that ``like``, a checkpoint of the same model, has for tensors that are there.

    Returns:
        What was added.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in like.items():
        if tensor.memory is not None:
            groups.setdefault(tensor.memory, []).append(name)
    said = []
    for names in groups.values():
        there = [name for name in names if isinstance(weights.get(name), LazyTensor)]
        if not there or len(there) == len(names):
            continue
        first = there[0]
        shared = replace(weights[first], memory=weights[first].memory or ("tied", first))
        weights[first] = shared
        for name in names:
            if name not in weights:
                weights[name] = shared
                said.append(f"`{name}` was added: it is tied to `{first}`.")
    return said
