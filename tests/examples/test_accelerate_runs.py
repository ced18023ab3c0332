"""``examples/accelerate_train.py``: alone, under a file of ``configs/accelerate``, and with everything from Hydra."""

import csv
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import hydra
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration

from accelerate_train import METRICS, Options, train
from smp_strategy.testing import run_ranks
from tests.interpreters import forked_interpreters
from tracking import CSVTracker

ROOT = Path(__file__).parents[2]

SIZES = {"steps": 4, "evaluate_every": 2, "save_every": 2, "warmup": 1, "layers": 2, "width": 48, "context": 32}
SIZES |= {"train_windows": 48, "val_windows": 32, "max_bytes": 1_000_000, "accumulate": 2}


def metrics(folder):
    """Everything that was logged, in its order."""
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    assert rows
    return rows


def same(found, expected):
    assert len(found) == len(expected)
    assert all(row == pytest.approx(other, rel=1e-5) for row, other in zip(found, expected, strict=True))


def train_alone(folder):
    warnings.simplefilter("ignore")
    AcceleratorState._reset_state(reset_partial_state=True)
    del os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]  # as in a process without a launcher
    options = Options(output=str(folder), **SIZES)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        log_with=CSVTracker(options.output, METRICS),
    )
    assert not hasattr(accelerator, "smp")
    train(accelerator, options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process under Accelerate as it is, with two micro-steps per step."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(train_alone, 1, folder)
    assert metrics(folder)[0]["val_loss"] == pytest.approx(math.log(256), abs=0.3)
    return folder


def test_the_script_under_the_launcher_trains_like_one_process(alone, tmp_path):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    file, script = ROOT / "configs" / "accelerate" / "cpu_4.yaml", ROOT / "examples" / "accelerate_train.py"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), str(script)]
    with forked_interpreters():
        done = subprocess.run(
            [*launcher, *arguments, "--output=out"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=280,
        )
    told = done.stdout
    assert done.returncode == 0, told[-3000:]
    same(metrics(tmp_path / "out"), metrics(alone))
    assert told.count("4 ranks = pp 2 x dp_replicate 1 x dp_shard 2") == 1
    assert len(re.findall(r"validation loss .*, perplexity", told)) == 3  # by one process
    assert len(
        re.findall(r"^step +\d+/\d+, \d+\.\d samples/s, about (?:\d+ min )?\d+ s left, train loss", told, re.MULTILINE)
    )
    assert told.count("sampled from out/model") == 1


def train_with_hydra(folder, checkpoint):
    warnings.simplefilter("ignore")
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    overrides = [f"++options.{name}={value}" for name, value in SIZES.items()]
    given = ["smp=tp2", f"smp.partition_file={folder}/partition.json", f"options.output={folder}"]
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = hydra.compose("accelerate_train", [*given, *overrides, f"options.resume={checkpoint}"])
    accelerator = hydra.utils.instantiate(cfg.accelerator, _convert_="all")
    train(accelerator, hydra.utils.instantiate(cfg.options))
    return accelerator.smp.shape.tp


def test_a_layout_from_hydra_goes_on_from_the_checkpoint_of_one_process(alone, tmp_path):
    assert run_ranks(train_with_hydra, 2, tmp_path, alone / "step_2") == [2, 2]
    later = [row for row in metrics(alone) if row["step"] > 2 or (row["step"] == 2 and "val_loss" in row)]
    same(metrics(tmp_path), later)
    assert (tmp_path / "partition.json").exists()
