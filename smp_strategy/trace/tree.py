"""Nests of containers, with dataclasses among the containers.

What a unit takes and returns may be any nest of tuples, lists, dicts, named tuples and dataclasses. PyTorch's pytree
knows all of them except dataclasses, which it wants registered one by one.
"""

import dataclasses
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["flatten"]


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of ``tree`` and how to put them together again; a dataclass is registered when it is first met."""
    leaves, structure = pytree.tree_flatten(tree)
    unknown = [kind for kind in {type(leaf) for leaf in leaves} if hasattr(kind, "__dataclass_fields__")]
    known = False
    for kind in unknown:
        if all(field.init for field in dataclasses.fields(kind)):
            pytree.register_dataclass(kind)
            known = True
    return flatten(tree) if known else (leaves, structure)
