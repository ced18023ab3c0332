"""``smp export --merge-adapters`` writes what ``merge_and_unload`` of PEFT makes, bit for bit."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tools_checks import smp

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=False, **{**SIZES, **options})
    return transformers.LlamaForCausalLM(config)


LINEAR = ["q_proj", "v_proj", "down_proj"]
CASES = {
    "transposed layers": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "layers": (llama, {"target_modules": LINEAR}),
    "half precision": (lambda: llama().bfloat16(), {"target_modules": LINEAR}),
    "an embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "other ranks": (llama, {"target_modules": LINEAR, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}}),
    "another scaling": (llama, {"target_modules": LINEAR, "use_rslora": True}),
    "a whole module": (llama, {"target_modules": LINEAR, "modules_to_save": ["lm_head"]}),
}


def adapted(base, options):
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(1.0)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", ["folders", "a file", "a sharded checkpoint"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_merged_is_what_peft_merges(case, source, tmp_path):
    make, options = CASES[case]
    base, adapters, out = tmp_path / "base", tmp_path / "adapters", tmp_path / "out"
    make().save_pretrained(base)
    model = adapted(make(), options)
    model.save_pretrained(adapters)
    checkpoint = base
    if source != "folders":
        (adapters / "adapter_model.safetensors").unlink()
        checkpoint = tmp_path / "model.pt"
        torch.save(model.state_dict(), checkpoint)
    if source == "a sharded checkpoint":
        assert smp("import", checkpoint, tmp_path / "sharded", "--prefix", "net.", "--quiet") == 0
        checkpoint = tmp_path / "sharded"
    assert smp("export", checkpoint, out, "--hf", base, "--merge-adapters", adapters, "--quiet") == 0
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "expected")
    found, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "expected"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    loaded = type(merged).from_pretrained(out)
    for name, value in merged.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_is_said(tmp_path, capsys):
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    llama().save_pretrained(base)
    adapted(llama(), {"target_modules": LINEAR, "use_dora": True}).save_pretrained(adapters)

    def refusal(*arguments):
        assert smp("export", *arguments, "--merge-adapters", adapters, "--quiet") != 0
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "use_dora needs another way than plain LoRA" in refusal(base, tmp_path / "out")
    adapted(llama(), {"target_modules": LINEAR}).save_pretrained(adapters)
    assert "--form full keeps what training needs" in refusal(base, tmp_path / "out", "--form", "full")
    llama(hidden_size=32).save_pretrained(tmp_path / "wider")
    assert "but its adapter is for [16, 32]" in refusal(tmp_path / "wider", tmp_path / "out")
    gpt2().save_pretrained(tmp_path / "other")
    assert "there is no `model.layers.0.mlp.down_proj.weight` in it" in refusal(tmp_path / "other", tmp_path / "out")
    config = json.loads((adapters / "adapter_config.json").read_text())
    (adapters / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LOHA"}))
    assert "LOHA needs another way" in refusal(base, tmp_path / "out")
    (adapters / "adapter_config.json").unlink()
    assert "has no configuration of LoRA adapters" in refusal(base, tmp_path / "out")
    model = adapted(gpt2(), {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True})
    model.save_pretrained(adapters)
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    assert "has an adapter and is tied to" in refusal(tmp_path / "tied.pt", tmp_path / "out")
