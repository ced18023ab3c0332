"""``examples/finetune.py``: the losses of one process in all layouts, of all weights and of adapters."""

import csv
from pathlib import Path

import pytest
from scripts import run_script

FINETUNE = Path(__file__).parents[2] / "examples" / "finetune.py"
# An epoch is one step: Lightning shuffles what replicas read, so only the samples of a whole epoch are the same.
SMALL = [
    *("data.train_windows=16", "data.val_windows=16", "data.context=32", "data.max_bytes=100000"),
    *("trainer.max_steps=2", "model.optimization.warmup_steps=1", "smp.microbatches=2"),
]
# Replicas read their batches of 8 from what one process reads at once.
LAYOUTS = {"pp2": (2, 16), "sdp2": (2, 8), "tp2": (2, 16), "pp2_sdp2": (4, 8)}
# Additions in another order.
TOLERANCE = 1e-5


def losses_of(folder, *overrides, ranks=1):
    """Validation losses: before the first step, and after each epoch."""
    folder.mkdir()
    told = run_script(folder, FINETUNE, f"hydra.run.dir={folder}", *SMALL, *overrides, ranks=ranks)
    assert "checkpoints/best.ckpt" in told
    with (folder / "metrics.csv").open() as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process_in_all_layouts(layout, tuning, tmp_path):
    expected = losses_of(tmp_path / "single", "smp=single", f"tuning={tuning}", "batch_size=16")
    assert len(expected) == 3
    assert expected[-1] < expected[0]
    ranks, batch_size = LAYOUTS[layout]
    options = (f"smp={layout}", f"tuning={tuning}", f"batch_size={batch_size}")
    assert losses_of(tmp_path / layout, *options, ranks=ranks) == pytest.approx(expected, rel=TOLERANCE)
