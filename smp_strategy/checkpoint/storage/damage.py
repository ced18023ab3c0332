"""Damage report of a folder with a manifest: the bytes that have changed, and the tensors that they belong to."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smp_strategy.checkpoint.storage import manifest
from smp_strategy.checkpoint.storage.manifest import Manifest
from smp_strategy.checkpoint.storage.verified_reads import Files
from smp_strategy.errors import CheckpointError

__all__ = ["Damage", "problems_of_files"]


class Damage(NamedTuple):
    """One damaged stretch of a file."""

    file: str
    tensor: str
    """Name of the tensor, object or file that the bytes belong to; empty if not known."""
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.what}"


def problems_of_files(directory: Path) -> list[Damage] | None:
    """Compare all bytes of a sharded folder with its manifest; ``None`` if it has no manifest."""
    try:
        found = Manifest.from_bytes((directory / manifest.FILE_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        return [Damage(manifest.FILE_NAME, "", str(error))]
    problems: list[Damage] = []
    with Files(directory) as files:
        for file in found.files:
            try:
                problems += _problems_of_file(files, file, found)
            except CheckpointError as error:
                problems.append(Damage(file, "", str(error)))
    return problems


def _problems_of_file(files: Files, file: str, found: Manifest) -> Iterator[Damage]:
    regions, memory = found.files[file], memoryview(bytearray(found.piece))

    def read(start: int, stop: int) -> memoryview:
        files.read_into(file, start, memory[: stop - start])
        return memory[: stop - start]

    size, expected = files.size(file), sum(region.length for region in regions)
    if size > expected:
        yield Damage(file, "", f"has {size - expected} bytes too many.")
    for region in regions:
        if region.offset + region.length > size:
            yield Damage(file, region.name, f"is cut off: the file ends after {size} bytes, of {expected}.")
            continue
        if damaged := [f"{start} to {stop}" for start, stop in region.changed(read, found.piece)]:
            yield Damage(file, region.name, f"bytes {', '.join(damaged[:3])} have changed since they were written.")
