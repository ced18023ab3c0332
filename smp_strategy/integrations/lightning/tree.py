"""Lazy imports from either of Lightning's two trees, ``lightning.pytorch`` or ``pytorch_lightning``.

Lightning is imported only when a tree is named: the package works with either, and imports only the one in use.
"""

from importlib import import_module
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
