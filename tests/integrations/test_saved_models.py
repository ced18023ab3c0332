"""Model files of a partitioned model: byte for byte those of one plain process, whichever layout writes them."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate_checks import assert_same, fresh_accelerator, on_ranks
from hf_checks import alone, language_model, text_trainer, weights_of
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from saved_models import LAYOUTS, assert_same_files, contents, plain, trained
from transformers import AutoModelForCausalLM, modeling_utils

from smp_strategy.errors import PeerFailedError, UnsupportedError

CASES = [(name, layout) for name in ("gpt2", "llama") for layout in LAYOUTS] + [("mixtral", "pp2"), ("mixtral", "sdp2")]


def saves(name, smp, folder):
    accelerator, model = trained(name, smp)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="5KB")
    how = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save, "max_shard_size": "5KB"}
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(folder / "given", **how, state_dict=whole, variant="own")
    accelerator.save_model(model, folder / "accelerate", max_shard_size="5KB")
    accelerator.save_model(model, folder / "accelerate one")
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    assert_same(model.state_dict(), weights)  # it can be made whole afterwards
    return weights


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_files_are_those_of_one_process(name, layout, tmp_path):
    world_size, smp = LAYOUTS[layout]
    weights = on_ranks(saves, world_size, name, smp, tmp_path)[0]
    model = plain(name, weights)
    model.save_pretrained(tmp_path / "plain" / "one")
    model.save_pretrained(tmp_path / "plain" / "many", max_shard_size="5KB")
    model.save_pretrained(tmp_path / "plain" / "given", max_shard_size="5KB", variant="own")
    for each, options in (("one", {}), ("many", {}), ("given", {"variant": "own"})):
        assert_same_files(tmp_path / each, tmp_path / "plain" / each)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / each, **options)
        assert_same(loaded.state_dict(), weights)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    on_ranks(saves_plainly, 1, name, weights, tmp_path / "plain")
    assert_same_files(tmp_path / "accelerate", tmp_path / "plain" / "accelerate")
    assert_same_files(tmp_path / "accelerate one", tmp_path / "plain" / "accelerate one")


def saves_plainly(name, weights, folder):
    accelerator = fresh_accelerator(None)
    model = plain(name, weights)
    accelerator.save_model(model, folder / "accelerate", max_shard_size="5KB")
    accelerator.save_model(model, folder / "accelerate one")


def saves_adapters(name, smp, folder):
    accelerator, model = trained(name, smp)
    model.save_pretrained(folder / "found")
    model.save_pretrained(folder / "given", state_dict=accelerator.get_state_dict(model))
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def saves_adapters_plainly(name, weights, folder):
    plain(name, weights).save_pretrained(folder)


@pytest.mark.parametrize("name", ["adapted", "with whole parts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_those_of_one_process(layout, name, tmp_path):
    world_size, smp = LAYOUTS[layout]
    weights = on_ranks(saves_adapters, world_size, name, smp, tmp_path)[0]
    on_ranks(saves_adapters_plainly, 1, name, weights, tmp_path / "plain")
    for way in ("found", "given"):
        assert "adapter_model.safetensors" in contents(tmp_path / way)
        assert_same_files(tmp_path / way, tmp_path / "plain")


def saves_by_trainer(folder, smp, model):
    trainer = text_trainer(folder / "run", smp, model(), save_strategy="epoch")
    trainer.train()
    trainer.save_model(folder / "saved")
    return weights_of(trainer)


def saves_by_plain_trainer(folder, model, weights):
    trainer = text_trainer(folder / "run", None, model())
    trainer.model.load_state_dict(weights)
    trainer.save_model(folder / "saved")


def tied_language_model():
    return language_model(tied=True)


def adapted_language_model():
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return get_peft_model(language_model(), config)


def language_model_with_whole_parts():
    """PEFT saves some modules whole, of which it asks for the names of their tensors."""
    torch.manual_seed(0)
    parts = {"target_modules": ["c_attn"], "modules_to_save": ["ln_f", "lm_head"]}
    return get_peft_model(language_model(), LoraConfig(r=2, init_lora_weights=False, fan_in_fan_out=True, **parts))


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2"])
@pytest.mark.parametrize("model", [tied_language_model, adapted_language_model, language_model_with_whole_parts])
def test_the_files_of_a_trainer_are_those_of_one_process(model, layout, tmp_path):
    world_size, smp = LAYOUTS[layout]
    weights = on_ranks(saves_by_trainer, world_size, tmp_path, smp, model)[0]
    alone(saves_by_plain_trainer, tmp_path / "plain", model, weights)
    ours, theirs = tmp_path / "saved", tmp_path / "plain" / "saved"
    assert_same_files(ours, theirs, besides=("training_args.bin", "config.json"))
    [checkpoint] = (tmp_path / "run").iterdir()
    file = "model.safetensors" if model is tied_language_model else "adapter_model.safetensors"
    assert contents(checkpoint)[file] == contents(ours)[file]
    if model is tied_language_model:
        found = AutoModelForCausalLM.from_pretrained(ours)
        assert_same(found.state_dict(), weights)


def converts(smp, folder):
    """As with PiSSA, whose trained adapters are saved as the difference to those at the beginning."""
    accelerator = fresh_accelerator(None if smp is None else {**smp, "restore_module": "all"})
    model = adapted_language_model()
    model.save_pretrained(folder / "begin")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(16).reshape(2, 8)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    save = partial(model.save_pretrained, folder / "end", path_initial_model_for_weight_conversion=folder / "begin")
    if smp is not None:
        with pytest.raises(UnsupportedError, match="loads the initial adapter into the model.* `restore_module"):
            save()
    accelerator.end_training()
    if accelerator.is_main_process:
        save()


def test_a_conversion_of_adapters_is_refused_until_the_model_is_whole(tmp_path):
    on_ranks(converts, 2, LAYOUTS["sdp2"][1], tmp_path / "found")
    on_ranks(converts, 1, None, tmp_path / "plain")
    found, expected = (load_file(tmp_path / each / "end" / "adapter_model.safetensors") for each in ("found", "plain"))
    assert_same(found, expected)


class Hub:
    """Notes the folders that are uploaded; ``fails``: has no room for another model."""

    def __init__(self, fails):
        self.fails, self.uploaded = fails, []

    def create_repo(self, name, **_):
        if self.fails:
            raise OSError("no room on the hub")
        return SimpleNamespace(repo_id=name)

    def upload(self, folder, *_, **__):
        self.uploaded.append(sorted(each.name for each in Path(folder).iterdir()))


def uploads(smp, folder, fails, is_save):
    hub = Hub(fails)
    for library in (modeling_utils, transformers.utils.hub):
        library.hf_api = lambda: hub
        library.create_and_tag_model_card = lambda *_, **__: ModelCard("A model.")
    accelerator, model = trained("llama", smp)
    model._upload_modified_files = hub.upload
    try:
        if is_save:
            model.save_pretrained(folder, accelerator.is_main_process, push_to_hub=True)
        else:
            model.push_to_hub("model")
    except (OSError, PeerFailedError) as error:
        return str(error)
    return hub.uploaded


@pytest.mark.parametrize("is_save", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_uploaded_once_and_errors_reach_all_ranks(fails, is_save, tmp_path):
    first, other = on_ranks(uploads, 2, LAYOUTS["sdp2"][1], tmp_path / "model", fails, is_save)
    if fails:
        assert first == "no room on the hub"
        assert other.startswith(f"Rank 0 failed while {'saving' if is_save else 'uploading'} a model")
    else:
        assert first == [["README.md", "config.json", "generation_config.json", "model.safetensors"]]
        assert other == []
