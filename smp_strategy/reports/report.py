"""Base class of reports: one decision or measurement as text, JSON and HTML, saved in the form of the file's suffix."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from smp_strategy.errors import ConfigError
from smp_strategy.planning.output_file import write_atomically

__all__ = ["Report"]


class Report(ABC):
    """Explanation, timeline or memory report. ``print(report)`` shows the text form."""

    noun: ClassVar[str]
    """Kind of report with its article, for error messages."""

    @property
    @abstractmethod
    def writes_here(self) -> bool:
        """Whether this rank writes the file in :meth:`save`."""

    @abstractmethod
    def __str__(self) -> str:
        """Plain text for a terminal, at most :data:`~smp_strategy.reports.table.WIDTH` columns of tables."""

    @abstractmethod
    def to_json(self) -> str:
        """All of it as data."""

    @abstractmethod
    def to_html(self) -> str:
        """Self-contained page: no scripts, and nothing is loaded from elsewhere."""

    def save(self, path: str | Path) -> None:
        """Write it to a file in the form of the file's suffix: ``.txt``, ``.json`` or ``.html``.

        All ranks may call this: global rank 0 writes a timeline or a memory report, every rank writes the same
        explanation.

        Raises:
            ConfigError: the suffix is another one; raised on all ranks.
            SMPError: the file could not be written.
        """
        path = Path(path)
        forms = {".txt": self.__str__, ".json": self.to_json, ".html": self.to_html}
        if path.suffix not in forms:
            raise ConfigError(
                f"{self.noun} is written as {', '.join(forms)}, but the file is to be {path.name!r}. Change its ending."
            )
        if self.writes_here:
            write_atomically(path, forms[path.suffix]() + "\n")
