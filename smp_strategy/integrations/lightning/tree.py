"""Lazy imports from either of Lightning's two trees, ``lightning.pytorch`` or ``pytorch_lightning``.

Lightning is imported only when a tree is named: the package works with either, and imports only the one in use.

Lightning checks ``isinstance`` against its own classes, and there are two sets of them. Our code therefore inherits
nothing of Lightning's, and is combined with the base class of a tree here (:meth:`Tree.subclass`), once per tree.
"""

from importlib import import_module
from types import new_class
from typing import Any, Final

__all__ = ["Tree"]

_FABRIC: Final = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class Tree:
    """The modules of one Lightning tree."""

    def __init__(self, root: str) -> None:
        self.root = root

    def pytorch(self, name: str) -> Any:
        """The module ``name`` of this tree, e.g. ``trainer.states``."""
        return import_module(f"{self.root}.{name}")

    def fabric(self, name: str) -> Any:
        """The module ``name`` of the Fabric that belongs to this tree, e.g. ``utilities.distributed``."""
        return import_module(f"{_FABRIC[self.root]}.{name}")

    def subclass(self, name: str, hooks: type, base: type, **names: Any) -> Any:
        """Class ``name`` of ``hooks``, which have this as their ``tree``, and a ``base`` class of Lightning's."""
        where = "integrations.lightning" if self.root == "lightning.pytorch" else "pytorch_lightning"
        body = {"tree": self, "__module__": f"smp_strategy.{where}", "__doc__": hooks.__doc__, **names}
        return new_class(name, (hooks, base), exec_body=lambda own: own.update(body))
