"""Real text without a download: the source and the documentation of Python's standard library, or your own files.

Byte-level models need no tokenizer, so a text is one long tensor of bytes. The last tenth of every document is held
out for validation.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Windows", "bounded", "modules", "read_folder", "split", "standard_library"]

HELD_OUT = 0.1  # part of each document that validation reads
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}


class Windows(Dataset[Tensor]):
    """Pieces of ``length`` bytes of ``text``, from the places ``starts``."""

    def __init__(self, text: Tensor, starts: Tensor, length: int) -> None:
        self.text = text
        self.starts = starts.tolist()
        self.length = length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.length].long()


def standard_library() -> Iterator[bytes]:
    """The modules of the standard library, without its tests, and the language reference that ``help()`` shows."""
    from pydoc_data.topics import topics

    yield "\n\n".join(text for _, text in sorted(topics.items())).encode()
    for path in modules(sysconfig.get_path("stdlib")):
        yield path.read_bytes()


def modules(folder: str) -> Iterator[Path]:
    """The modules below ``folder``, by their names; folders that are skipped may be large and are not looked into."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED:
                yield from modules(entry.path)
        elif entry.name.endswith(".py"):
            yield Path(entry.path)


def read_folder(path: Path) -> Iterator[bytes]:
    """The file ``path``, or all files below the folder ``path`` in the order of their names."""
    if path.is_file():
        yield path.read_bytes()
        return
    if not path.is_dir():
        raise FileNotFoundError(f"`data.path={path}` is neither a file nor a folder.")
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file.read_bytes()


def bounded(documents: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """``documents`` until they sum up to ``max_bytes``; the last one is cut."""
    left = max_bytes
    for document in documents:
        if left <= 0:
            return
        yield document[:left]
        left -= len(document)


def split(documents: Iterator[bytes] | Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Training and validation text: the first nine tenths of every document, and the rest."""
    train, held_out = bytearray(), bytearray()
    for document in documents:
        cut = len(document) - int(HELD_OUT * len(document))
        train += document[:cut]
        held_out += document[cut:]
    return tensor_of(train), tensor_of(held_out)


def tensor_of(text: bytearray) -> Tensor:
    """The bytes as a tensor that shares their memory."""
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
