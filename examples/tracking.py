"""A tracker for Accelerate that needs nothing installed: a ``metrics.csv`` such as Lightning's CSVLogger writes."""

import csv
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

__all__ = ["CSVTracker"]


class CSVTracker(GeneralTracker):  # type: ignore[misc]  # published without type information
    """Writes a row for every call of ``accelerator.log``.

    Args:
        folder: where the file is; a run that is resumed adds to it.
        columns: the names of all metrics.
    """

    name = "csv"
    requires_logging_directory = False

    def __init__(self, folder: str, columns: tuple[str, ...]) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.columns = ("step", *columns)

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Make the folder, and the file if there is none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._write(self.columns)

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, float], step: int | None = None, **options: Any) -> None:
        """Add a row; metrics that are not in ``values`` leave their column empty."""
        row = {"step": step, **values}
        self._write([row.get(name, "") for name in self.columns])

    def _write(self, row: Any) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(row)
