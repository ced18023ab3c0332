"""Ray Train starts the ranks, where Ray is installed (``pip install '.[ray]'``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray.train")

# Workers would wait for all other processes of a busy machine, longer than Ray waits for them.
PATIENT = {
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
}
SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "ray_train.py"


def trained(storage: Path, *arguments: str) -> tuple[dict[str, float], str]:
    """The last report of a run, and what it has printed."""
    command = [sys.executable, str(SCRIPT), "--storage", str(storage), *arguments]
    done = subprocess.run(
        command, env={**os.environ, **PATIENT}, capture_output=True, text=True, check=False, timeout=560
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray's own processes may print something at the end.
    report = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    return json.loads(report), done.stderr


def weights(report):
    folder = Path(report["checkpoint"])
    if (folder / "checkpoint.ckpt").exists():
        return torch.load(folder / "checkpoint.ckpt", weights_only=True)["state_dict"]
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("door", ["lightning", "accelerate"])
def test_workers_that_are_started_again_end_with_the_weights_of_a_run_without_failure(door, tmp_path):
    whole, _ = trained(tmp_path / "whole", "--door", door)
    again, told = trained(tmp_path / "again", "--door", door, "--fail-in-epoch", "1")
    assert (tmp_path / "again" / "struck").exists()
    assert "failed" in told
    assert len([*(tmp_path / "again" / "smp").glob("checkpoint_2*")]) == 3  # no epoch was trained twice
    assert again["epoch"] == whole["epoch"] == 2
    expected, actual = weights(whole), weights(again)
    assert list(expected) == list(actual)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
