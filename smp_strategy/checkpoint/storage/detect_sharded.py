"""Opens sharded folders and checks that they are complete, as far as sizes and descriptions tell."""

from typing import NamedTuple

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import dcp_metadata, manifest
from smp_strategy.checkpoint.storage.dcp_metadata import DirectoryContents, ItemLocation
from smp_strategy.checkpoint.storage.manifest import Manifest, Region
from smp_strategy.checkpoint.storage.remote_path import Place, place_of
from smp_strategy.checkpoint.storage.verified_reads import DamageError, Files
from smp_strategy.errors import CheckpointError

__all__ = ["Opened", "Regions", "is_sharded", "opened", "verify_whole"]

Regions = dict[tuple[str, int], Region]


class Opened(NamedTuple):
    """Sharded folder that looks complete."""

    contents: DirectoryContents
    manifest: Manifest | None
    """``None`` if another program has written the folder."""
    regions: Regions
    """Regions of the manifest by file and offset."""


def is_sharded(path: Place | str) -> bool:
    """Whether ``path`` is a folder of PyTorch's distributed checkpoints, ours or another's."""
    path = commit.readable(place_of(path))
    return path.is_dir() and (path / dcp_metadata.FILE_NAME).is_file()


def opened(path: Place) -> Opened:
    """Read the descriptions of a sharded folder, and compare them with the sizes of the files.

    Raises:
        DamageError: they do not agree, or a description is damaged or hostile.
        CheckpointError: it is no such directory.
    """
    path = commit.readable(path)
    if not is_sharded(path):
        raise CheckpointError(
            f"{path} is no directory that ranks have written together: there is no {dcp_metadata.FILE_NAME} in it."
        )
    try:
        data = (path / dcp_metadata.FILE_NAME).read_bytes()
        found = None
        if (path / manifest.FILE_NAME).is_file():
            found = Manifest.from_bytes((path / manifest.FILE_NAME).read_bytes())
            verify_whole(found, dcp_metadata.FILE_NAME, data)
        contents = dcp_metadata.from_bytes(data)
        if contents.has_manifest and found is None:
            raise DamageError(f"{manifest.FILE_NAME}, which was written with it, is missing.")
        files = found.files.items() if found else ()
        regions = {(file, region.offset): region for file, each in files for region in each}
        _check_locations(path, contents, found, regions)
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error}") from error
    except CheckpointError as error:
        raise DamageError(f"{path} is damaged, or no checkpoint: {error}") from error
    return Opened(contents, found, regions)


def verify_whole(found: Manifest, file: str, data: bytes) -> None:
    """Compare the content of a file that is one region with its digests.

    Raises:
        DamageError: the content has changed.
    """
    regions = found.files.get(file, ())

    def read(start: int, stop: int) -> bytes:
        return data[start:stop]

    is_whole = len(data) == sum(region.length for region in regions)
    if not is_whole or any(any(region.changed(read, found.piece)) for region in regions):
        raise DamageError(f"{file} has changed since it was written.")


def _check_locations(path: Place, contents: DirectoryContents, found: Manifest | None, regions: Regions) -> None:
    """Check that files have the expected sizes, and that ``.metadata`` and the manifest agree."""
    with Files(path) as files:
        for file, parts in found.files.items() if found else ():
            size, expected = files.size(file), sum(region.length for region in parts)
            if size != expected:
                raise DamageError(f"{file} has {size} bytes, but was written with {expected}.")
        locations = [(name, location, 0) for name, location in contents.objects.items()]
        for name, (described, chunks) in contents.tensors.items():
            locations += [(name, chunk.location, chunk.part.numel * described.dtype.itemsize) for chunk in chunks]
        for name, location, num_bytes in locations:
            if location.offset + location.length > (size := files.size(location.file)):
                raise DamageError(f"{location.file} ends after {size} bytes, before the end of `{name}`.")
            if found is not None:
                _check_agreement(name, location, num_bytes, regions)


def _check_agreement(name: str, location: ItemLocation, num_bytes: int, regions: Regions) -> None:
    region = regions.get((location.file, location.offset))
    if region is None or region.length != location.length or (num_bytes and region.values != num_bytes):
        raise DamageError(f"{manifest.FILE_NAME} tells of `{name}` other than {dcp_metadata.FILE_NAME}.")
