"""Whole runs: ``examples/train.py`` from the command line, with Lightning's launcher, in sweeps and under torchrun."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import run_script

from tests.interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "train.py"

# A model and data so small that a run takes seconds; two epochs of two steps.
SMALL_TEXT = ["data.train_windows=32", "data.val_windows=16", "data.max_bytes=1000000"]
SMALL = [*SMALL_TEXT, "trainer.max_steps=4", "model.optimization.warmup_steps=1"]
SMALL_GPT = ["model.model.layers=2", "model.model.width=48", *SMALL]
FULL_REPORT = "smp.smp_report=full"


def run(folder, *command):
    """Run ``command`` with this Python in ``folder``; what it told the user."""
    with forked_interpreters():
        result = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=280,
        )
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


def train(folder, *overrides, ranks=1):
    """Run the example on ``ranks`` as under ``torchrun``."""
    return run_script(folder, TRAIN, f"hydra.run.dir={folder}", *overrides, ranks=ranks)


def validation_losses(folder):
    with (folder / "metrics.csv").open() as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]


def weights(folder):
    return torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]


def test_a_pipeline_trains_to_the_weights_of_the_reference_and_says_what_it_did(tmp_path):
    for name in ("single", "pp2"):
        (tmp_path / name).mkdir()
    train(tmp_path / "single", "smp=single", *SMALL_GPT)
    told = run(tmp_path / "pp2", TRAIN, f"hydra.run.dir={tmp_path}/pp2", "smp=pp2", *SMALL_GPT)

    expected, actual = weights(tmp_path / "single"), weights(tmp_path / "pp2")
    assert list(expected) == list(actual)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)

    losses = validation_losses(tmp_path / "pp2")
    assert len(losses) == 3
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert losses[-1] < losses[0]

    for part in (
        "stage  ranks  units",
        "Limited by the ",
        "Schedule of a training step (",
        "sampled from best.ckpt",
        "written to",
    ):
        assert told.count(part) == 1, part  # by rank 0 alone, and once
    for name in ("metrics.csv", "loss.png", "partition.json", "checkpoints/best.ckpt"):
        assert f"  {name}\n" in told
        assert (tmp_path / "pp2" / name).stat().st_size > 0
    assert json.loads((tmp_path / "pp2" / "partition.json").read_text())


# A vision transformer on digits, and GPT-2 with tied embeddings on text.
HUGGING_FACE = {
    "vit_hf": ("data=digits", "trainer.max_steps=2", "model.config.num_hidden_layers=2"),
    "gpt2_hf": ("model.config.n_layer=2", "model.config.n_embd=48", *SMALL),
}


@pytest.mark.parametrize("model", HUGGING_FACE)
def test_models_of_hugging_face_train_in_a_pipeline(model, tmp_path):
    told = train(tmp_path, "smp=pp2", f"model={model}", *HUGGING_FACE[model], ranks=2)
    if model == "gpt2_hf":
        assert "sampled from best.ckpt" in told
        assert len(validation_losses(tmp_path)) == 3
    else:
        assert "checkpoints/last.ckpt" in told
        assert "sampled" not in told


@pytest.mark.parametrize(
    ("layout", "ranks", "said"),
    [
        ("zero1", 2, "The state of the optimizers is dealt out over 2 replicas"),
        ("pp2_sdp2", 4, "4 ranks = pp 2 x dp_replicate 1 x dp_shard 2, placement DSPT"),
    ],
)
def test_replicas_that_share_state_train_and_write_the_best_model(layout, ranks, said, tmp_path):
    told = train(tmp_path, f"smp={layout}", f"trainer.devices={ranks}", FULL_REPORT, *SMALL_GPT, ranks=ranks)
    assert told.count(said) == 1
    losses = validation_losses(tmp_path)
    assert losses[-1] < losses[0]
    state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    [optimizer] = state["optimizer_states"]
    assert len(optimizer["state"]) == sum(len(group["params"]) for group in optimizer["param_groups"])


def test_shards_train_and_one_process_goes_on_from_their_checkpoint(tmp_path):
    for name in ("sdp2", "single"):
        (tmp_path / name).mkdir()
    told = train(tmp_path / "sdp2", "smp=sdp2", FULL_REPORT, *SMALL_GPT, ranks=2)
    assert told.count("Each unit is spread over 2 ranks") == 1
    losses = validation_losses(tmp_path / "sdp2")
    assert losses[-1] < losses[0]
    last = tmp_path / "sdp2" / "checkpoints" / "last.ckpt"
    train(tmp_path / "single", "smp=single", *SMALL_GPT, "trainer.max_steps=6", f"resume={last}")
    assert validation_losses(tmp_path / "single")[-1] < losses[-1]
    state = torch.load(tmp_path / "single" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 6


def test_a_sweep_runs_one_layout_after_the_other_in_one_folder_each(tmp_path):
    run(tmp_path, TRAIN, "-m", "smp=pp2,single", f"hydra.sweep.dir={tmp_path}/sweep", *SMALL_GPT)
    first, second = (weights(tmp_path / "sweep" / number) for number in "01")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == ["0", "1"]
    assert not (tmp_path / "outputs").exists()


def test_a_partition_written_by_hand_is_loaded_from_the_command_line(tmp_path):
    stages = {"tokens": 0, "positions": 0, "blocks.0": 1, "blocks.1": 0, "norm": 1, "head": 1}
    units = [{"name": f"model.{name}", "stage": stage} for name, stage in stages.items()]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": 1, "num_stages": 2, "units": units}))
    told = train(
        tmp_path,
        "smp=pp2",
        "smp.load_partition=true",
        f"smp.partition_file={path}",
        FULL_REPORT,
        *SMALL_GPT,
        "trainer.max_steps=1",
        ranks=2,
    )
    # Long cells are wrapped: the rows that go on have no number.
    shown, stage = {"0": "", "1": ""}, ""
    for cells in (line.split("│") for line in told.splitlines() if line.count("│") > 2):
        stage = cells[1].strip() or stage
        shown[stage] += cells[2]
    assert [row.split() for row in shown.values()] == [
        ["model.tokens,", "model.positions,", "model.blocks.1"],
        ["model.blocks.0,", "model.norm,", "model.head"],
    ]


def test_torchrun_runs_the_example_in_one_run_directory(tmp_path):
    run(
        tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN, "smp=pp2", *SMALL_GPT
    )  # fmt: skip
    [folder] = (tmp_path / "outputs").glob("*/*")
    assert len(validation_losses(folder)) == 3
    assert sorted(path.name for path in folder.glob("*.log")) == ["train.log", "train_rank1.log"]
