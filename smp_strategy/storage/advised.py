"""A directory that, if it turns out to be damaged, tells which other checkpoint to load.

Damage is found when values are read, which may be long after it was opened, in the first step of a run.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from torch import Tensor

from smp_strategy.errors import CheckpointError
from smp_strategy.storage.held import Held
from smp_strategy.storage.previous import advice, problems_of
from smp_strategy.storage.source import Described
from smp_strategy.storage.stored import Stored

__all__ = ["AdvisedDirectory"]


@final
class AdvisedDirectory:
    """Reads as :class:`~smp_strategy.storage.stored.Stored` does.

    Args:
        path: the directory.

    Raises:
        CheckpointError: it is none, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._advising():
            self._stored = Stored.open(path)

    @property
    def tensors(self) -> Mapping[str, Described]:
        """All tensors, by their flat names."""
        return self._stored.tensors

    @property
    def objects(self) -> Collection[str]:
        """The flat names of everything else."""
        return self._stored.objects

    @property
    def paths(self) -> Mapping[str, tuple[Any, ...]]:
        """The way to each in the nested state."""
        return self._stored.paths

    def fill(self, wanted: Mapping[str, Held]) -> None:
        """Write values of tensors to the blocks of this rank."""
        with self._advising():
            self._stored.fill(wanted)

    def read(self, name: str) -> Tensor:
        """A tensor as a whole, in host memory."""
        with self._advising():
            return self._stored.read(name)

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their flat names."""
        with self._advising():
            return self._stored.read_objects(names)

    def rest(self, *, weights_only: bool = True) -> dict[str, Any]:
        """What else belongs to the checkpoint."""
        with self._advising():
            return self._stored.rest(weights_only=weights_only)

    @contextmanager
    def _advising(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if problems_of(self._path):
                raise CheckpointError(f"{error} {advice(self._path)}") from error
            raise
