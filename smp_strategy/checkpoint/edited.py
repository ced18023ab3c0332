"""A state that was loaded, and that hooks of the user may have changed since, as a source.

Entries that nobody has touched are :class:`UnreadTensor` still. Each rank reads of them what it needs, straight to its
place, whatever they are called by now. The others have values, which are taken from there.
"""

from collections.abc import Collection, Mapping
from typing import Any, final

from torch import Tensor

from smp_strategy.checkpoint.sources import WholeState, flattened
from smp_strategy.checkpoint.storage.held_tensor import Held
from smp_strategy.checkpoint.storage.lazy_tensor import Readable, UnreadTensor

__all__ = ["EditedState"]


@final
class EditedState:
    """A :class:`~smp_strategy.checkpoint.storage.source.Source`.

    Args:
        state: dicts in dicts, with tensors and other objects.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._entries = flattened(state)
        self._whole = WholeState(self._entries)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors."""
        return self._whole.tensors

    @property
    def objects(self) -> list[str]:
        """The names of everything else."""
        return self._whole.objects

    def fill(self, wanted: Mapping[str, Held]) -> None:
        """See :class:`~smp_strategy.checkpoint.storage.source.Source`."""
        unread: dict[Readable, dict[str, Held]] = {}
        others: dict[str, Held] = {}
        for name, held in wanted.items():
            tensor = self._entries.get(name)
            if isinstance(tensor, UnreadTensor) and not tensor.is_read:
                of_source = unread.setdefault(tensor.source, {})
                if tensor.stored_as not in of_source:
                    of_source[tensor.stored_as] = held
                    continue
            others[name] = held
        for source, of_source in unread.items():
            source.fill(of_source)
        self._whole.fill(others)

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
        return self._whole.read_objects(names)
