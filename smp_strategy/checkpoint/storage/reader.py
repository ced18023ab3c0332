"""Reader of sharded checkpoints: ours, or any that PyTorch's distributed checkpointing (DCP) writes.

Each rank reads the rectangles that it needs. A folder of ours has a manifest: all bytes that are read are verified, and
values are found without parsing files. Other folders are read by ``torch.load(..., weights_only=True)``, item by item.

Resharding on load: copies stored rectangles of a tensor to the rectangles that this rank holds.

If their intersection is contiguous both in the file and in memory, the bytes are read in place. Otherwise rows of the
stored rectangle are read into a window, and the wanted elements are copied from there.
"""

import io
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.async_save import in_host_memory, raw
from smp_strategy.checkpoint.storage.dcp_format import Path as Way
from smp_strategy.checkpoint.storage.dcp_metadata import Chunk, DirectoryContents, ItemLocation
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.checkpoint.storage.remote_path import AnyPath, any_path
from smp_strategy.checkpoint.storage.torch_load import load_failure
from smp_strategy.checkpoint.storage.verified_reads import DamageError, Files, FileSlice, RegionReader
from smp_strategy.checkpoint.storage.verify import Opened, advice, is_sharded, opened, verify_whole
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.checkpoint.storage.writer import REST
from smp_strategy.distributed.device import is_host
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle, disjoint, intersection

__all__ = ["CheckpointReader", "is_sharded", "Copy", "Values", "check_cover", "copies_of", "scatter", "tensor_in"]


@final
class CheckpointReader:
    """Sharded folder, opened for reading by :meth:`open`."""

    note: Mapping[str, Any]
    """The writer's description; empty if another program has written the folder."""
    tensors: Mapping[str, LocalTensorInfo]
    """All tensors, by their flat names."""
    objects: Collection[str]
    """Flat names of everything else. A list of dicts is one object, though it is stored in pieces."""
    paths: Mapping[str, Way]
    """Path to each in the nested state; the flat name where the writer has stored no path."""

    def __init__(self, path: AnyPath, directory: AnyPath, found: Opened) -> None:
        self._path, self._directory = path, directory
        self._contents, self._manifest, self._regions = found
        contents = found.contents
        self._lists = _lists(contents)
        hidden = {name for parts in self._lists.values() for name in parts}
        self.note = found.manifest.note if found.manifest else {}
        self.tensors = {name: each for name, (each, _) in contents.tensors.items() if name not in hidden}
        self.objects = [*(name for name in contents.objects if name not in hidden), *self._lists]
        self.paths = {name: self._way(name) for name in (*self.tensors, *self.objects)}

    @classmethod
    def open(cls, path: AnyPath | str) -> "CheckpointReader":
        """Open a folder; no values are read.

        Raises:
            CheckpointError: it is none, damaged, or hostile.
        """
        path = any_path(path)
        with _offering_another(path):
            directory = commit.readable(path)
            return cls(path, directory, opened(directory))

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy the values of tensors to this rank's rectangles. Reads and verifies the needed bytes only.

        Args:
            wanted: Tensors by flat names. Rectangles may be on any device, and of another floating-point dtype than in
                the file.

        Raises:
            CheckpointError: a tensor is missing, of another shape, not complete, or damaged. Blocks may be written to
                before that is found.
        """
        work: list[tuple[ItemLocation, str, HeldTensor, Chunk]] = []
        for name, held in wanted.items():
            chunks = self._checked(name, held)
            check_cover(name, held, chunks)
            work += [(chunk.location, name, held, chunk) for chunk in chunks]
        work.sort(key=lambda each: each[0])
        with _offering_another(self._path), Files(self._directory) as files, torch.no_grad():
            scratch = torch.from_numpy(np.empty(WINDOW, dtype=np.uint8))
            small = memoryview(bytearray(self._manifest.piece)) if self._manifest else memoryview(b"")
            for location, name, held, chunk in work:
                described = self._contents.tensors[name][0]
                for _, copies in copies_of(held, [chunk]):
                    region = self._regions.get((location.file, location.offset))
                    if region is None:
                        values: Any = _Loaded(tensor_in(files, name, chunk))
                    else:
                        values = RegionReader(files, location.file, region, len(small), small)
                    scatter(values, chunk.part.sizes, described.dtype, copies, scratch)

    def read(self, name: str) -> Tensor:
        """A whole tensor, in host memory.

        Raises:
            CheckpointError: see :meth:`fill`.
        """
        if name not in self._contents.tensors:
            raise CheckpointError(f"{self._directory} has no tensor `{name}`.")
        described, chunks = self._contents.tensors[name]
        # Before allocating: a hostile shape can be anything, but stored parts were compared with the sizes of files.
        check_cover(name, HeldTensor.whole(torch.empty(described.shape, dtype=described.dtype, device="meta")), chunks)
        tensor = torch.empty(described.shape, dtype=described.dtype)
        self.fill({name: HeldTensor.whole(tensor)})
        return tensor

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their flat names.

        Raises:
            CheckpointError: there is none of a name, it is damaged, or cannot be loaded without running code.
        """
        found = {}
        with _offering_another(self._path), Files(self._directory) as files:
            for name in names:
                if name in self._lists:
                    found[name] = _assembled({way: self._part(files, part) for part, way in self._lists[name].items()})
                elif name in self._contents.objects:
                    found[name] = self._part(files, name)
                else:
                    raise CheckpointError(f"{self._directory} has no object `{name}`.")
        return found

    def rest(self, *, weights_only: bool = True) -> dict[str, Any]:
        """Content of ``meta.pt``: everything but tensors and objects; empty if there is no such file.

        Args:
            weights_only: See ``torch.load``. Without it a file can run code: only for files that one trusts.

        Raises:
            CheckpointError: it is damaged, or cannot be loaded.
        """
        path = self._directory / REST
        listed = self._manifest is not None and REST in self._manifest.files
        if not listed and not path.is_file():
            return {}
        try:
            data = path.read_bytes()
            if self._manifest is not None and listed:
                verify_whole(self._manifest, REST, data)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except DamageError as error:
            raise CheckpointError(f"{path.parent} is damaged: {error} {advice(self._path, quickly=True)}") from error
        except Exception as error:  # torch.load raises any exception on damaged bytes
            raise CheckpointError(
                f"{path} {load_failure(error)} Load it with `weights_only=False` if you trust whoever wrote it."
            ) from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} should have a dict, but has a {type(found).__name__}.")
        return found

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, which are stored once, with the first name of each."""
        first: dict[tuple[Chunk, ...], str] = {}
        found = {}
        for name in self.tensors:
            chunks = self._contents.tensors[name][1]
            if chunks and first.setdefault(chunks, name) != name:
                found[name] = first[chunks]
        return found

    @property
    def has_digests(self) -> bool:
        return self._manifest is not None

    def place(self, name: str) -> str:
        """Names of the files that have a tensor or an object, for people."""
        if name in self._lists:
            return ", ".join(dict.fromkeys(self.place(part) for part in self._lists[name]))
        if name in self._contents.objects:
            return self._contents.objects[name].file
        return ", ".join(dict.fromkeys(chunk.location.file for chunk in self._contents.tensors[name][1]))

    def _way(self, name: str) -> Way:
        if name in self._lists:
            part, inside = next(iter(self._lists[name].items()))
            return self._contents.paths[part][: -len(inside)]
        return self._contents.paths.get(name, (name,))

    def _checked(self, name: str, held: HeldTensor) -> tuple[Chunk, ...]:
        if name not in self._contents.tensors:
            raise CheckpointError(f"{self._directory} has no tensor `{name}`.")
        described, chunks = self._contents.tensors[name]
        if described.shape != tuple(held.shape):
            raise CheckpointError(
                f"`{name}` has shape {list(described.shape)} in {self._directory}, but {list(held.shape)} here. Load "
                "it into the model that it was saved from."
            )
        if described.dtype != held.dtype and not (described.dtype.is_floating_point and held.dtype.is_floating_point):
            raise CheckpointError(
                f"`{name}` is {described.dtype} in {self._directory}, but {held.dtype} here, and only floating-point "
                "values are converted."
            )
        return chunks

    def _part(self, files: Files, name: str) -> Any:
        if name in self._contents.tensors:
            return self.read(name)
        location = self._contents.objects[name]
        data = bytearray(min(location.length, files.size(location.file)))
        region = self._regions.get((location.file, location.offset))
        if region is None:
            files.read_into(location.file, location.offset, memoryview(data))
        else:
            assert self._manifest is not None

            def read(start: int, stop: int) -> memoryview:
                memory = memoryview(data)[start - location.offset : stop - location.offset]
                files.read_into(location.file, start, memory)
                return memory

            if any(region.changed(read, self._manifest.piece)):
                raise DamageError(
                    f"{self._directory / location.file} is damaged: `{name}` has changed since it was written."
                )
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises any exception on damaged bytes
            raise CheckpointError(f"`{name}` in {self._directory / location.file} {load_failure(error)}") from error


@final
class _Loaded:
    """Values of a tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = raw(in_host_memory(tensor))

    def read_into(self, start: int, memory: memoryview) -> None:
        """Implements :class:`~smp_strategy.checkpoint.storage.reader.Values`."""
        memory[:] = self._bytes[start : start + len(memory)]


@contextmanager
def _offering_another(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except DamageError as error:
        # All ranks may be here, so none reads a whole other checkpoint to verify it.
        raise CheckpointError(f"{error} {advice(path, quickly=True)}") from error


def _lists(contents: DirectoryContents) -> dict[str, dict[str, Way]]:
    """Lists with other things than tensors in them: by their names, the stored parts and the place of each in the
    list."""
    found: dict[str, dict[str, Way]] = defaultdict(dict)
    for name in (*contents.objects, *contents.tensors):
        path = contents.paths.get(name, ())
        number = next((number for number, key in enumerate(path) if isinstance(key, int)), 0)
        if number:
            found[".".join(map(str, path[:number]))][name] = path[number:]
    return {
        name: parts
        for name, parts in found.items()
        if any(part in contents.objects for part in parts) and name not in contents.objects
    }


def _assembled(leaves: Mapping[Way, Any]) -> Any:
    """The list, dict or leaf that the parts make up."""
    if list(leaves) == [()]:
        return leaves[()]
    inside: dict[str | int, dict[Way, Any]] = defaultdict(dict)
    for (key, *way), leaf in leaves.items():
        inside[key][tuple(way)] = leaf
    items = {key: _assembled(parts) for key, parts in inside.items()}
    if all(isinstance(key, int) for key in items):
        return [items[key] for key in sorted(items, key=int)]
    return items


WINDOW: Final = 32 * 2**20  # bytes


class Values(Protocol):
    """Bytes of a row-major array."""

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``start`` on."""


@final
class Copy:
    """Copy of the intersection of a stored and a wanted rectangle."""

    def __init__(self, chunk: Chunk, block: HeldRectangle, common: Rectangle) -> None:
        self.target = common.view_of(block.tensor.detach(), block.rectangle)
        offsets = tuple(offset - start for offset, start in zip(common.offsets, chunk.part.offsets, strict=True))
        self.inside = Rectangle(offsets, common.sizes)
        """The intersection as a rectangle of the stored part."""


def copies_of(held: HeldTensor, chunks: Sequence[Chunk]) -> list[tuple[Chunk, list[Copy]]]:
    """The copies from each stored part that intersects the wanted rectangles."""
    found = []
    for chunk in chunks:
        copies = []
        for block in held.blocks:
            common = intersection(chunk.part, block.rectangle)
            if common is not None and common.numel:
                copies.append(Copy(chunk, block, common))
        if copies or not chunk.part.numel:  # read it anyway: its item can be damaged
            found.append((chunk, copies))
    return found


def check_cover(name: str, held: HeldTensor, chunks: Sequence[Chunk]) -> None:
    """Make sure that the stored parts cover all wanted elements.

    Raises:
        CheckpointError: they do not.
    """
    for block in held.blocks:
        rectangle = block.rectangle
        parts = [common for chunk in chunks if (common := intersection(chunk.part, rectangle)) is not None]
        there = sum(part.numel for part in parts)
        if there > rectangle.numel:
            there = sum(part.numel for part in disjoint(parts))
        if there != rectangle.numel:
            raise CheckpointError(
                f"The checkpoint is not complete: of `{name}`, {rectangle.numel - there} of {rectangle.numel} elements "
                f"from {list(rectangle.offsets)} on are in no file."
            )


def scatter(values: Values, sizes: Sequence[int], dtype: torch.dtype, copies: Sequence[Copy], scratch: Tensor) -> None:
    """Copy from one stored part.

    Args:
        values: Bytes of the part, as stored.
        sizes: Sizes of the part.
        dtype: Dtype of its elements.
        copies: Copies to make.
        scratch: Memory for ``WINDOW`` bytes.
    """
    row = math.prod(sizes[1:]) * dtype.itemsize
    for copy in copies:
        run, target = copy.inside.run_in(sizes), copy.target
        if run is not None and target.dtype == dtype and is_host(target.device) and target.is_contiguous():
            values.read_into(run.start * dtype.itemsize, raw(target))
            continue
        if not sizes:
            values.read_into(0, raw(scratch[: dtype.itemsize]))
            target.copy_(scratch[: dtype.itemsize].view(dtype)[0])
            continue
        step, start = max(1, WINDOW // row), copy.inside.offsets[0]
        for first in range(0, copy.inside.sizes[0], step):
            count = min(step, copy.inside.sizes[0] - first)
            if count * row > scratch.nbytes:  # a row longer than the window
                scratch = torch.from_numpy(np.empty(count * row, dtype=np.uint8))
            window = scratch[: count * row]
            values.read_into((start + first) * row, raw(window))
            rows = window.view(dtype).view(count, *sizes[1:])
            for dim in range(1, len(sizes)):
                rows = rows.narrow(dim, copy.inside.offsets[dim], copy.inside.sizes[dim])
            target.narrow(0, first, count).copy_(rows)


def tensor_in(files: Files, name: str, chunk: Chunk) -> Tensor:
    """A stored part of a folder without a manifest, as a tensor.

    Raises:
        DamageError: it is damaged, or none.
    """
    file, offset, length = chunk.location
    try:
        found = torch.load(
            io.BufferedReader(FileSlice(files, file, offset, length)), map_location="cpu", weights_only=True
        )
    except DamageError:
        raise
    except Exception as error:  # torch.load raises any exception on damaged bytes
        raise DamageError(
            f"{files.directory / file} is damaged, or no file of PyTorch: `{name}` in it {load_failure(error)}"
        ) from error
    if not isinstance(found, Tensor) or tuple(found.shape) != chunk.part.sizes:
        what = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise DamageError(
            f"{files.directory / file} is damaged: of `{name}` it should have a part of shape "
            f"{list(chunk.part.sizes)}, but there is {what}."
        )
    return found
