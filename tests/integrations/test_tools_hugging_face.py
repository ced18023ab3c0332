"""What ``smp export --hf`` writes is what ``from_pretrained`` of transformers wants, for models of several kinds."""

import json

import lightning.pytorch as pl
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from smp_strategy.cli import main

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16)
    ),
    "gpt2_base": lambda: transformers.GPT2Model(
        transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=16)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=40)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SIZES)
    ),
    "llama_untied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=False, **SIZES)
    ),
}


class Wrapped(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def save(model, path, *, is_sharded):
    """As a Trainer saves it: plain Lightning's file, or that as a directory of ours."""
    torch.save(
        {
            "state_dict": Wrapped(model).state_dict(),
            "pytorch-lightning_version": pl.__version__,
            "epoch": 0,
            "global_step": 0,
        },
        path / "plain.ckpt",
    )
    if is_sharded:
        assert main(["import", str(path / "plain.ckpt"), str(path / "ours.ckpt"), "--quiet"]) == 0
    return path / ("ours.ckpt" if is_sharded else "plain.ckpt")


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_from_pretrained_finds_all_weights_and_no_others(kind, is_sharded, tmp_path):
    model = MODELS[kind]()
    model.config.save_pretrained(tmp_path / "config")
    checkpoint, out = save(model, tmp_path, is_sharded=is_sharded), tmp_path / "out"
    size = "10KB" if is_sharded else "5GB"
    arguments = ["export", str(checkpoint), str(out), "--hf", str(tmp_path / "config"), "--max-shard-size", size]
    assert main([*arguments, "--quiet"]) == 0
    assert (out / "model.safetensors.index.json").exists() == is_sharded
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.equal(expected[name]), name
    every = [name for file in out.glob("*.safetensors") for name in load_file(file)]
    tied = {name for name in expected if expected[name].data_ptr() in seen(expected, name)}
    assert sorted(every) == sorted(set(expected) - tied)


def seen(state, name):
    names = list(state)
    return {state[other].data_ptr() for other in names[: names.index(name)]}


def test_auto_classes_and_another_dtype(tmp_path):
    model = MODELS["gpt2"]()
    model.config.save_pretrained(tmp_path / "config")
    (tmp_path / "config" / "tokenizer_config.json").write_text("{}")
    checkpoint, out = save(model, tmp_path, is_sharded=True), tmp_path / "out"
    arguments = ["export", str(checkpoint), str(out), "--hf", str(tmp_path / "config"), "--dtype", "bfloat16"]
    assert main([*arguments, "--quiet"]) == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor.bfloat16())
    assert (out / "tokenizer_config.json").exists()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_of_hugging_face_become_a_checkpoint_and_come_back(tmp_path):
    model = MODELS["t5"]()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    ours, back = tmp_path / "ours.ckpt", tmp_path / "back"
    assert main(["import", str(tmp_path / "theirs"), str(ours), "--prefix", "model.", "--form", "full", "--quiet"]) == 0
    checkpoint = torch.load(ours, weights_only=True)
    wrapped = Wrapped(MODELS["t5"]())
    missing, unexpected = wrapped.load_state_dict(checkpoint["state_dict"], strict=False)
    assert not unexpected
    assert set(missing) <= {
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "model.lm_head.weight",
    }
    assert main(["export", str(ours), str(back), "--hf", str(tmp_path / "theirs"), "--quiet"]) == 0
    loaded, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(back, output_loading_info=True)
    assert not info["missing_keys"]
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor)


def test_several_attributes_with_weights_are_listed(tmp_path, capsys):
    module = nn.ModuleDict({"model": MODELS["vit"](), "metric": nn.Linear(2, 2)})
    torch.save(
        {"state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}, tmp_path / "plain.ckpt"
    )
    module["model"].config.save_pretrained(tmp_path / "config")
    arguments = ["export", str(tmp_path / "plain.ckpt"), str(tmp_path / "out"), "--hf", str(tmp_path / "config")]
    assert main(arguments) == 2
    assert "`metric.` (2)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--prefix", "model."]) == 0
    assert "2 tensors were left out" in capsys.readouterr().err
