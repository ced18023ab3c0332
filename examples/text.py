"""Real text without a download: the source and the documentation of Python's standard library, or your own files.

Byte-level models need no tokenizer, so a text is one long tensor of bytes. The last tenth of every document is held
out for validation. A training epoch is a fixed number of windows at random places, drawn anew each epoch from the
seed and the epoch's number alone: every process draws the same ones, and a resumed run goes on where it stopped.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["TextData", "Windows", "read_folder", "split", "standard_library"]

HELD_OUT = 0.1  # part of each document that validation reads


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


class TextData(L.LightningDataModule):
    """Windows of bytes for training and validation.

    Args:
        path: a file, or a folder whose files are read; ``None``: the standard library of this Python.
        context: bytes that the model sees; a window holds one more.
        batch_size: windows per batch.
        train_windows: windows per epoch.
        val_windows: windows of held-out text, at even distances.
        max_bytes: text beyond this is not read.
        seed: where the training windows lie.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        context: int,
        batch_size: int,
        train_windows: int,
        val_windows: int,
        max_bytes: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.length = context + 1
        self.batch_size = batch_size
        self.train_windows = train_windows
        self.val_windows = val_windows
        self.max_bytes = max_bytes
        self.seed = seed
        self.train_text = self.val_text = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str) -> None:
        """Read the text; every process reads the same bytes in the same order."""
        if self.train_text.numel():
            return
        documents = standard_library() if self.path is None else read_folder(Path(self.path))
        self.train_text, self.val_text = split(bounded(documents, self.max_bytes))
        shortest = min(self.train_text.numel(), self.val_text.numel())
        if shortest < self.length:
            raise ValueError(
                f"`data.path={self.path}` leaves {shortest} bytes on one side of the split, "
                f"but a window needs {self.length}. Give a longer text or a smaller `data.context`."
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """New windows each epoch (the trainer asks again: ``reload_dataloaders_every_n_epochs=1``)."""
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        # Two small numbers make one seed that differs for every pair.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        starts = torch.randint(self.train_text.numel() - self.length + 1, (self.train_windows,), generator=generator)
        return DataLoader(Windows(self.train_text, starts, self.length), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Always the same windows."""
        last = self.val_text.numel() - self.length
        starts = torch.linspace(0, last, self.val_windows, dtype=torch.float64).long()
        return DataLoader(Windows(self.val_text, starts, self.length), batch_size=self.batch_size)


def standard_library() -> Iterator[bytes]:
    """The modules of the standard library, without its tests, and the language reference that ``help()`` shows."""
    from pydoc_data.topics import topics

    yield "\n\n".join(text for _, text in sorted(topics.items())).encode()
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            yield path.read_bytes()


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
