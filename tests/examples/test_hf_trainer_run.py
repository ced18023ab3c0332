"""``examples/hf_trainer.py``: fine-tuning on two stages under ``accelerate launch``, and on in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import BertConfig, BertForSequenceClassification

from tests.interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]
SMALL = ["--layers=3", "--hidden_size=16", "--train_samples=64", "--eval_samples=32", "--disable_tqdm=true"]

# Gradients of microbatches are added.
TOLERANCE = 1e-4


def run(folder, *command, epochs, options=()):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SMP_", "ACCELERATE_"))}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    options = [*SMALL, *options, f"--output_dir={folder}", f"--num_train_epochs={epochs}"]
    command = [sys.executable, *command, str(ROOT / "examples" / "hf_trainer.py"), *options]
    with forked_interpreters():
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


def evaluation_losses(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]


def test_the_example_starts_from_a_pretrained_model_on_two_stages(tmp_path):
    plain, two = tmp_path / "plain", tmp_path / "two"
    for folder in (plain, two):
        folder.mkdir()
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    # Stages draw other numbers than one process.
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=256, hidden_size=16, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "pretrained", max_shard_size="20KB")
    options = [f"--pretrained={tmp_path / 'pretrained'}"]
    run(plain, epochs=1, options=options)
    layout = yaml.safe_load((ROOT / "configs" / "accelerate" / "cpu_2.yaml").read_text())
    options_of_layout = {"pipeline_parallel_degree": 2, "microbatches": 4, "delayed_parameter_initialization": True}
    layout["smp_config"] = options_of_layout
    (tmp_path / "layout.yaml").write_text(yaml.safe_dump(layout))
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "layout.yaml")]
    run(two, *launch, epochs=1, options=options)
    assert evaluation_losses(two) == pytest.approx(evaluation_losses(plain), rel=TOLERANCE)
