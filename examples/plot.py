"""The loss curves of a run as a picture, from the ``metrics.csv`` that Lightning's CSVLogger wrote."""

import csv
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["plot_losses", "read_curve"]


def read_curve(metrics: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of the metric ``name``; rows of other metrics leave its column empty."""
    with metrics.open(newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw training and validation loss over optimizer steps; no display is needed."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, marker in (("train_loss", ""), ("val_loss", "o")):
        curve = read_curve(metrics, name)
        axes.plot([step for step, _ in curve], [value for _, value in curve], marker=marker, label=name)
    axes.set(xlabel="optimizer step", ylabel="loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
