"""`from_pretrained` in `configure_model` under delayed initialisation: the values of plain loading, in any layout."""

import copy
import os

import pytest
import torch
from lightning_toy import NEWER, error_of, on_ranks, toy_module, toy_trainer
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from smp_strategy.engine.pretrained import deferring
from smp_strategy.model.deferred_tensor import DeferredTensor

VOCABULARY = 64
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
TP2 = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}
LAYOUTS = {
    "pp2": (2, PP2),
    "sdp2": (2, SDP2),
    "tp2": (2, TP2),
    "pp2_sdp2": (4, {**SDP2, **PP2}),
    "pp2_tp2": (4, {**TP2, **PP2}),
    "bf16": (2, {**PP2, "bf16": True}),
}


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=32))


def mixtral():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, **sizes))


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}


def saved(folder, model, **options):
    """Folder with the pretrained weights of ``model``, in several files."""
    torch.manual_seed(3)
    MODELS[model]().save_pretrained(folder, max_shard_size="30KB", **options)
    return folder


def tokens():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randint(0, VOCABULARY, (16, 12), generator=generator), batch_size=4)


def tuned(folder, load, *, adapted=lambda net: net):
    """A module as users write it: it loads pretrained weights in ``configure_model``."""

    def configure_model(self):
        if not hasattr(self, "model"):
            torch.manual_seed(5)
            self.model = adapted(load(folder))

    def loss(self, batch):
        return self.model(input_ids=batch, labels=batch).loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch))

    module = toy_module(
        NEWER,
        configure_model=configure_model,
        loss=loss,
        training_step=training_step,
        configure_optimizers=configure_optimizers,
        validation_step=validation_step,
        on_train_batch_start=lambda self, batch, batch_idx: None,
    )
    del module.net
    return module


def values_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def validate_and_fit(folder, weights, load, options, adapted=lambda net: net):
    """Weights after a run without a change, and weights and losses after training."""
    module = tuned(weights, load, adapted=adapted)
    smp = None if options is None else {**options, "delayed_parameter_initialization": True, "restore_module": "all"}
    toy_trainer(folder, smp=smp).validate(module, tokens(), verbose=False)
    begun = values_of(module)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1)
    trainer.fit(module, tokens())
    return begun, values_of(module), float(trainer.callback_metrics["train_loss"])


def plain_load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_hold_what_plain_loading_gives(model, layout, tmp_path):
    if model == "mixtral" and layout not in ("pp2", "sdp2"):
        pytest.skip("its experts are one tensor; the two ways to divide that suffice")
    weights = saved(tmp_path / "pretrained", model)
    [(begun, ended, loss)] = on_ranks(validate_and_fit, 1, tmp_path / "plain", weights, plain_load, None)
    size, options = LAYOUTS[layout]
    for found_begun, found_ended, found_loss in on_ranks(
        validate_and_fit, size, tmp_path / "smp", weights, plain_load, options
    ):
        assert_equal(found_begun, begun)
        if layout != "bf16":
            replicas = size // options["pipeline_parallel_degree"] // options.get("tensor_parallel_degree", 1)
            if replicas == 1:
                assert found_loss == pytest.approx(loss, rel=1e-4)
                for name, expected in ended.items():
                    torch.testing.assert_close(found_ended[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_files_are_not_read_whole_where_they_cannot_be_mapped(tmp_path):
    weights = saved(tmp_path, "llama")
    with torch.device("meta"), deferring():
        net = LlamaForCausalLM.from_pretrained(weights, disable_mmap=True)
    assert all(isinstance(each, DeferredTensor) and not each.is_kept for each in net.parameters() if each.ndim > 1)


def with_new_head(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)


def in_bfloat16(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def with_more_tokens(folder):
    net = AutoModelForCausalLM.from_pretrained(folder)
    net.resize_token_embeddings(VOCABULARY + 6)
    with torch.no_grad():
        net.get_input_embeddings().weight[-1] = net.get_input_embeddings().weight[:VOCABULARY].mean(0)
    return net


def begin(folder, weights, load, options):
    module = tuned(weights, load)
    module.loss = lambda batch: module.model(input_ids=batch)[0].float().square().mean()
    smp = None if options is None else {**options, "delayed_parameter_initialization": True, "restore_module": "all"}
    toy_trainer(folder, smp=smp).validate(module, tokens(), verbose=False)
    return values_of(module)


@pytest.mark.parametrize("load", [with_new_head, in_bfloat16, with_more_tokens])
@pytest.mark.parametrize("form", [{}, {"safe_serialization": False}], ids=["safetensors", "bin"])
@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_heads_dtypes_and_new_tokens_are_those_of_plain_loading(load, form, layout, tmp_path):
    weights = tmp_path / "pretrained"
    saved(weights, "llama")
    if form:
        to_bin(weights)
    [expected] = on_ranks(begin, 1, tmp_path / "plain", weights, load, None)
    size, options = LAYOUTS[layout]
    for found in on_ranks(begin, size, tmp_path / "smp", weights, load, options):
        assert_equal(found, expected)


def to_bin(folder):
    """Replace the safetensors files of ``folder`` by one that ``torch.save`` has written."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(copy.deepcopy(state), folder / "pytorch_model.bin")


def with_lora(net, **options):
    """Adapters on attention and a new copy of the head, as users write it."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", **options)
    return get_peft_model(net, config)


def with_lora_and_head(net):
    return with_lora(net, modules_to_save=["lm_head"])


@pytest.mark.dear
@pytest.mark.parametrize("adapted", [with_lora, with_lora_and_head])
@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2", "pp2_sdp2"])
def test_adapters_are_made_and_trained_as_in_one_process(adapted, layout, tmp_path):
    weights = saved(tmp_path / "pretrained", "llama")
    [(begun, ended, loss)] = on_ranks(
        validate_and_fit, 1, tmp_path / "plain", weights, plain_load, None, adapted=adapted
    )
    size, options = LAYOUTS[layout]
    replicas = size // options["pipeline_parallel_degree"] // options.get("tensor_parallel_degree", 1)
    for found_begun, found_ended, found_loss in on_ranks(
        validate_and_fit, size, tmp_path / "smp", weights, plain_load, options, adapted=adapted
    ):
        assert_equal(found_begun, begun)
        frozen = {name: value for name, value in begun.items() if "lora_" not in name and "modules_to_save" not in name}
        assert_equal({name: found_ended[name] for name in frozen}, frozen)
        assert any(not torch.equal(found_ended[name], begun[name]) for name in begun)
        if replicas == 1:
            assert found_loss == pytest.approx(loss, rel=1e-4)
            for name, expected in ended.items():
                torch.testing.assert_close(found_ended[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_damaged_file_is_named(tmp_path):
    weights = saved(tmp_path / "pretrained", "llama")
    damaged = sorted(weights.glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-64])
    for message in on_ranks(error_of_loading, 2, tmp_path / "smp", weights, PP2):
        assert f"{damaged} cannot be read" in message
        assert "damaged, missing, or not written to its end" in message


def error_of_loading(folder, weights, options):
    return error_of(lambda: validate_and_fit(folder, weights, plain_load, options))


def look_and_change(folder, weights, load, options):
    """A hook before the first step reads weights, copies the model and halves a weight."""
    module, found = tuned(weights, load), {}

    def on_fit_start():
        found["norms"] = {name: float(weight.norm()) for name, weight in module.named_parameters()}
        module.copied = [copy.deepcopy(module.model)]
        with torch.no_grad():
            module.model.lm_head.weight.mul_(0.5)

    module.on_fit_start = on_fit_start
    smp = None if options is None else {**options, "delayed_parameter_initialization": True, "restore_module": "all"}
    toy_trainer(folder, smp=smp, max_epochs=1, limit_train_batches=1).fit(module, tokens())
    return found["norms"], values_of(module), [name for name, each in module.model.named_parameters() if each.is_meta]


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2"])
def test_hooks_before_the_first_step_see_values(layout, tmp_path):
    weights = saved(tmp_path / "pretrained", "llama")
    [(norms, ended, _)] = on_ranks(look_and_change, 1, tmp_path / "plain", weights, plain_load, None)
    size, options = LAYOUTS[layout]
    for found, state, on_meta in on_ranks(look_and_change, size, tmp_path / "smp", weights, plain_load, options):
        assert found == norms
        assert not on_meta
        if layout != "sdp2":
            for name, expected in ended.items():
                torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def change_by_rank(net):
    net.lm_head.weight.data.mul_(1 + int(os.environ.get("RANK", 0)))
    return net


def error_of_change(folder, weights, options):
    return error_of(lambda: validate_and_fit(folder, weights, plain_load, options, adapted=change_by_rank))


def test_changes_that_differ_between_ranks_are_refused(tmp_path):
    weights = saved(tmp_path / "pretrained", "llama")
    for message in on_ranks(error_of_change, 2, tmp_path / "smp", weights, PP2):
        assert "Ranks have different models" in message
        assert "changed by aten.mul_.Tensor[2]" in message
