"""``examples/hf_trainer.py``: fine-tuning on two stages under ``accelerate launch``, and on in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ["--layers=3", "--hidden_size=16", "--train_samples=64", "--eval_samples=32", "--disable_tqdm=true"]


def run(folder, *command, epochs):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SMP_", "ACCELERATE_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    options = [*SMALL, f"--output_dir={folder}", f"--num_train_epochs={epochs}"]
    command = [sys.executable, *command, str(ROOT / "examples" / "hf_trainer.py"), *options]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_example_trains_on_two_stages_and_goes_on_in_one_process(tmp_path):
    config = ROOT / "configs" / "accelerate" / "cpu_2.yaml"
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    assert "Process mesh: 2 ranks = pp 2 x dp 1" in run(tmp_path, *launch, epochs=1)
    assert (tmp_path / "checkpoint-2" / "smp_strategy.bin").is_file()
    run(tmp_path, epochs=2)
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4]
    assert 0 <= json.loads((tmp_path / "eval_results.json").read_text())["eval_accuracy"] <= 1
