"""One file of ``torch.save`` with whole tensors, from a state that is spread over ranks: it is never whole in memory.

``torch.save`` under ``skip_data`` lays the file out: it leaves room for the values of tensors. Global rank 0 then
gathers one tensor after the other, and writes it to its place. PyTorch reads the file like any other. Only the
checksums that a zip archive has for its members are missing for tensors; PyTorch does not look at them, but
``unzip -t`` does.

Writing follows [Note: errors of writers] of :mod:`smp_strategy.checkpoint.spread_state`.
"""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.file_plan import in_rounds
from smp_strategy.checkpoint.spread_state import SpreadState
from smp_strategy.config.sizes import show_count
from smp_strategy.distributed.rendezvous import alike
from smp_strategy.errors import CheckpointError

__all__ = ["write_torch_file"]

_WRITER = 0


def write_torch_file(state: SpreadState, make: Callable[[Mapping[str, Any]], Any], path: Path, *, doing: str) -> None:
    """Write an object that has the tensors of ``state`` to one file. Collective over all ranks.

    Args:
        state: Its tensors are gathered one by one.
        make: Makes the object of the entries of ``state``, whose tensors have memory but no values yet, so it must not
            copy them. It may have other tensors, too. It is called on global rank 0.
        path: Path of the new file, on global rank 0.
        doing: What this is, for messages: "saving the state of an optimizer".

    Raises:
        CheckpointError: a tensor would have no values, because it is in an object of a class of its own, or a copy.
        PeerFailedError: global rank 0 could not write.
    """
    names = list(state.tensors())
    file: _LaidOutFile | None = None
    with alike(doing):
        if dist.get_rank() == _WRITER:
            # Memory that nobody touches: the system provides none.
            empty = {
                name: torch.empty(info.shape, dtype=info.dtype, device="cpu") for name, info in state.tensors().items()
            }
            file = _LaidOutFile(path, make(state.entries(empty)), empty)
    for names_of_round in in_rounds(names, [state.num_bytes(name) for name in names]):
        with alike(doing):
            for name in names_of_round:
                value = state.collected(name, _WRITER)
                if file is not None and value is not None:
                    file.fill(name, value)
                del value  # before the next one is gathered
            if file is not None and file.error is not None:
                raise file.error


@final
class _LaidOutFile:
    """File of ``torch.save`` with room for the values of some tensors; those of others are there.

    Args:
        path: Path of the new file.
        content: The object that it has.
        empty: Tensors in it without values, by their names.

    Attributes:
        error: The first error of :meth:`fill`.
    """

    def __init__(self, path: Path, content: Any, empty: Mapping[str, Tensor]) -> None:
        self._path = path
        self.error: OSError | None = None
        with skip_data():
            torch.save(content, path)
        with FakeTensorMode():
            read = torch.load(path, map_location="cpu", weights_only=False)
        pairs = zip(pytree.tree_leaves(content), pytree.tree_leaves(read), strict=True)
        found = [(tensor, _offset(laid_out)) for tensor, laid_out in pairs if isinstance(tensor, Tensor)]
        self._refuse_hidden({offset for _, offset in found})
        names = {id(tensor): name for name, tensor in empty.items()}
        self._offsets = {names[id(tensor)]: offset for tensor, offset in found if id(tensor) in names}
        if lost := empty.keys() - self._offsets.keys():
            raise CheckpointError(
                f"`{min(lost)}` would have no values in {path}: the object there has a copy, or nothing."
            )
        for tensor, offset in found:
            if id(tensor) not in names:
                storage = tensor.detach().cpu().untyped_storage()
                self._write(offset, torch.empty(0, dtype=torch.uint8).set_(storage))

    def fill(self, name: str, value: Tensor) -> None:
        """Write the values of an entry. An error is kept in :attr:`error`, and nothing written after it."""
        if self.error is None:
            try:
                self._write(self._offsets[name], value.detach().cpu().contiguous().view(-1).view(torch.uint8))
            except OSError as error:
                self.error = error

    def _write(self, offset: int, values: Tensor) -> None:
        with self._path.open("r+b") as file:
            file.seek(offset)
            file.write(values.numpy().data)

    def _refuse_hidden(self, offsets: set[int]) -> None:
        with zipfile.ZipFile(self._path) as archive:
            there = sum("/data/" in name for name in archive.namelist())
        if there != len(offsets):
            raise CheckpointError(
                f"{show_count(there - len(offsets), 'tensor')} of {self._path} would have no values, in objects of "
                "other classes than dicts, lists and tuples. Keep tensors in these."
            )


def _offset(tensor: Tensor) -> int:
    # Documented in PyTorch's notes on serialization.
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset
