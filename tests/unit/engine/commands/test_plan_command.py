"""Commands `smp plan` and `smp estimate`: their output, their files, and their errors."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import GPT2Config, T5Config, ViTConfig

from smp_strategy.cli import main
from smp_strategy.config.config import SMPConfig

JOB = ["--cluster", "4xcpu", "--global-batch", "16", "--precision", "float32"]


@pytest.fixture
def gpt(tmp_path):
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=64, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(tmp_path / "gpt")
    return str(tmp_path / "gpt")


def own_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, lambda x: model(x).square().mean(), lambda count: torch.zeros(count, 8)


def without_loss():
    model, _, batch_of = own_model()
    return model, model, batch_of


def with_odd_batch():
    model, step, _ = own_model()
    return model, step, lambda count: torch.zeros(count, 7)


def test_a_plan_says_what_is_fastest_and_writes_what_runs_it(gpt, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("smp.yaml", "accelerate.yaml")]
    assert main(["plan", gpt, *JOB, "--hydra", files[0], "--accelerate", files[1]]) == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told
    assert "Memory of the fullest rank" in told
    assert max(map(len, told.splitlines())) <= 118
    hydra, accelerate = (yaml.safe_load(Path(file).read_text()) for file in files)
    assert hydra.pop("defaults") == ["base", "_self_"]
    assert hydra["pipeline_parallel_degree"] >= 1  # without it all ranks would be stages
    SMPConfig.from_options(**hydra)
    SMPConfig.from_options(**accelerate["smp_config"])
    assert (accelerate["num_processes"], accelerate["distributed_type"]) == (4, "MULTI_CPU")


def test_an_estimate_as_data(gpt, capsys):
    assert main(["estimate", gpt, *JOB, "--layout", "pp2_mb4", "--recompute", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["layout"]["pp"] == 2
    assert found["options"]["activation_checkpointing"] == "all"
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["samples_per_second"] == pytest.approx(16 / found["step_seconds"])


def test_images_and_a_function_of_the_user(tmp_path, capsys):
    ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16,
        architectures=["ViTForImageClassification"],
    ).save_pretrained(tmp_path / "vit")  # fmt: skip
    for model in (str(tmp_path / "vit"), f"{__name__}:own_model"):
        assert main(["plan", model, *JOB]) == 0
        assert "samples/s" in capsys.readouterr().out


def test_encoder_and_decoder_without_a_token_to_start_with(tmp_path, capsys):
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    config = T5Config(**sizes, architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(tmp_path / "t5")
    assert main(["plan", str(tmp_path / "t5"), *JOB, "--sequence", "8"]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_a_model_without_a_head_has_no_loss(tmp_path, capsys):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=64, architectures=["GPT2Model"])
    config.save_pretrained(tmp_path / "headless")
    assert main(["plan", str(tmp_path / "headless"), *JOB]) == 2
    assert "GPT2Model has no loss of its own. Name a class with a head" in capsys.readouterr().err


def test_nothing_fits(gpt, capsys):
    assert main(["plan", gpt, *JOB, "--memory-limit", "1KiB"]) == 1
    assert "Nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--cluster", "4xa101"], "Did you mean `a100`"),
        (["--layout", "pp3"], "needs a multiple of 3 devices"),
        (["--layout", "pp2_mb3"], "must be a multiple of 6"),
        (["--layout", "pp2_zbv"], "an estimate has no `pipeline`"),
        (["--layout", "pp2x"], "is not understood"),
    ],
)
def test_mistakes(gpt, changes, message, capsys):
    assert main(["estimate", gpt, *JOB, "--layout", "pp2_mb4", *changes]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "neither a folder"),
        ("no_such_module:make", "cannot be imported"),
        (f"{__name__}:nothing", "cannot be imported"),
        ("builtins:dict", "returned a dict"),
        (f"{__name__}:without_loss", "returned a tensor of shape [2, 8]. Let it return the loss"),
        (f"{__name__}:with_odd_batch", "If the step is wrong there, repair it or its example of a batch."),
    ],
)
def test_models_that_are_none(model, message, capsys):
    assert main(["plan", model, *JOB]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sequence", "--global-batch", "--show"])
def test_numbers_begin_at_one(option, gpt, capsys):
    with pytest.raises(SystemExit):
        main(["plan", gpt, *JOB, option, "0"])
    assert "'0' is no number from 1 on" in capsys.readouterr().err
