"""Models of Hugging Face for whose layers scripts register SageMaker's by hooks, and Falcon: models keep their layers.

The calls are those of AWS's `gpt2-custom`, `vit` and `falcon`, in their order. `ViTEncoder` of `vit` is not in today's
Transformers, so its layers are registered instead.
"""

import pytest
import torch
import transformers
from smp_checks import assert_same, on_ranks
from smp_strategy.smp.nn import DistributedTransformerLayer
from smp_strategy.smp.nn.huggingface.gpt2 import (
    get_hf_gpt2_transformer_layer_hooks,
    translate_hf_block_state_dict_to_smdistributed,
    translate_layer_state_dict_to_hf_gpt2_block,
)
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

import smp_strategy.smp as smp
from smp_strategy import ConfigError, UnsupportedError
from smp_strategy.integrations.sagemaker.run_state import current_run

VOCABULARY, LENGTH, STEPS = 48, 8, 3
GIVEN = {"ddp": True, "prescaled_batch": True, "auto_partition": False, "default_partition": 0}
LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "tp2": {"tensor_parallel_degree": 2, "optimize": "speed"},
    "sdp2": {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9},
}


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**sizes, **off, use_cache=False))


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(**sizes, **off, image_size=8, patch_size=4, num_labels=5, hidden_act="gelu")
    return transformers.AutoModelForImageClassification.from_config(config)


def falcon():
    config = transformers.FalconConfig(vocab_size=VOCABULARY, hidden_size=16, use_cache=False)
    config.num_hidden_layers, config.num_attention_heads, config.num_kv_heads = 2, 2, 2
    return transformers.FalconForCausalLM(config)


def of_script(config):
    return (), {"num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size}


def custom_gpt2():
    model = gpt2()
    smp.set_tensor_parallelism(model.transformer.h, True)
    smp.tp_register_with_module(GPT2Block, DistributedTransformerLayer, *get_hf_gpt2_transformer_layer_hooks())
    return model, model.transformer.h


def custom_vit():
    smp.tp_register_with_module(ViTLayer, smp.nn.DistributedTransformer, of_script, of_script, of_script)
    model = vit()
    smp.set_tensor_parallelism(model.vit.layers)
    return model, model.vit.layers


def falcon_of_transformers():
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, zero_init=True, dtype=torch.float32):
        model = falcon()
    return model, model.transformer.h


SCRIPTS = {"gpt2-custom": (gpt2, custom_gpt2), "vit": (vit, custom_vit), "falcon": (falcon, falcon_of_transformers)}


def batches(name):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return [
            {
                "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
                "labels": torch.randint(5, (4,), generator=generator),
            }
            for _ in range(STEPS)
        ]
    drawn = [torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in drawn]


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3)


@smp.step
def train_step(model, batch):
    loss = model(**batch)["loss"]
    model.backward(loss)
    return loss


def script(name, parameters):
    smp.init({**GIVEN, **parameters})
    transformers.set_seed(0)
    model, layers = SCRIPTS[name][1]()
    model = smp.DistributedModel(model, trace_device="gpu")
    for number, layer in enumerate(layers.children()):
        smp.set_partition(layer, number * smp.pp_size() // 2)
    optimizer = adamw(model.get_module())
    if name == "falcon" and smp.tp_size() == 1:
        for layer in layers.children():
            smp.set_activation_checkpointing(layer.self_attention)
    else:
        smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(optimizer)
    losses = []
    for batch in batches(name):
        rows = slice(smp.rdp_rank(), None, smp.rdp_size())
        optimizer.zero_grad(set_to_none=True)
        losses.append(train_step(model, {key: value[rows] for key, value in batch.items()}).reduce_mean())
        optimizer.step()
    assert any(True for _ in model.distributed_modules()) == (smp.tp_size() > 1)
    state = translate_layer_state_dict_to_hf_gpt2_block(model.state_dict(), LENGTH)
    model.load_state_dict(translate_hf_block_state_dict_to_smdistributed(state, LENGTH))
    return torch.stack(losses), state


def one_process(name):
    transformers.set_seed(0)
    model = SCRIPTS[name][0]()
    optimizer = adamw(model)
    losses = []
    for batch in batches(name):
        optimizer.zero_grad()
        losses.append(model(**batch)["loss"])
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach(), model.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_model_whose_layers_would_be_replaced_trains_as_in_one_process(name, layout):
    expected, weights = one_process(name)
    found = on_ranks(script, 2, name, LAYOUTS[layout])
    losses = torch.stack([each for each, _ in found])
    losses = losses.mean(dim=0, keepdim=True) if layout == "sdp2" else losses
    for each in losses:
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)
    for _, state in found:
        assert_same(state, weights, rtol=1e-4, atol=1e-5)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)


def registrations():
    smp.init({})
    smp.tp_register(smp.nn.DistributedLinear, init_hook=lambda: ((4, 4), {}))(Own)
    assert any("`Own` is not replaced by `smp.nn.DistributedLinear`" in note for note in current_run().noted)
    with pytest.raises(ConfigError, match="`module_class` must be a class of modules, but is 3"):
        smp.tp_register_with_module(3, smp.nn.DistributedLinear)
    for hook in get_hf_gpt2_transformer_layer_hooks():
        with pytest.raises(UnsupportedError, match="a model keeps its layers here. Pass the hooks to"):
            hook(None)


def test_a_registration_says_that_layers_are_kept():
    on_ranks(registrations, 1)
