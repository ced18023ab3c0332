"""Models of Hugging Face under SageMaker's own transformer: scripts that rely on its names, in the order of AWS's."""

import pytest
import torch
import transformers
from smp_checks import assert_same, on_ranks
from smp_strategy.smp.nn import FusedLayerNorm
from torch import nn
from transformers.modeling_utils import PreTrainedModel

import smp_strategy.smp as smp

VOCABULARY, LENGTH, STEPS = 48, 8, 3
LAYOUTS = {
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "pp2 x tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1.0}),
}
GIVEN = {"ddp": True, "prescaled_batch": True, "optimize": "speed", "auto_partition": False, "default_partition": 0}


def config(family="gpt2"):
    sizes = {"vocab_size": VOCABULARY, "use_cache": False, "initializer_range": 0.2}
    if family in ("gpt2", "gptj"):
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes.update(n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **dropout)
        return transformers.AutoConfig.for_model(family, **sizes, **({"rotary_dim": 4} if family == "gptj" else {}))
    if family == "gpt_neo":
        return transformers.GPTNeoConfig(
            **sizes, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
        )
    shared = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.AutoConfig.for_model(family, **sizes, **shared)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator) for _ in range(STEPS)]


def groups(module, norm):
    """Parameters with weight decay, and those of layer norms and biases, without."""
    decayed, plain = [], []
    for part in module.modules():
        for name, each in part.named_parameters(recurse=False):
            kind = plain if isinstance(part, norm) or name == "bias" else decayed
            if not any(each is other for other in (*decayed, *plain)):
                kind.append(each)
    return {"params": decayed}, {"params": plain, "weight_decay": 0.0}


def adamw(module, norm):
    return torch.optim.AdamW(groups(module, norm), lr=0.01, betas=(0.9, 0.95), weight_decay=0.5, eps=1e-3)


@smp.step
def train_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def script(parameters, folder, resumes, sublayers):
    smp.init({**GIVEN, **parameters})
    PreTrainedModel.init_weights = lambda x: None
    switched_off = PreTrainedModel.init_weights
    transformers.set_seed(0)
    with smp.model_creation(tensor_parallelism=True, zero_init=False, dtype=torch.float32, flash_attention=True):
        model = transformers.AutoModelForCausalLM.from_config(config())
    assert PreTrainedModel.init_weights is switched_off
    transformers.set_seed(smp.tp_rank())
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    m = model.get_module()
    layers = m.transformer.seq_layers
    for number, layer in enumerate(layers.children()):
        smp.set_partition(layer, number * smp.pp_size() // 2)
    optimizer = adamw(m, FusedLayerNorm)
    if sublayers:
        for layer in layers.children():
            smp.set_activation_checkpointing(layer.attention)
            smp.set_activation_checkpointing(layer.output)
    else:
        smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale=None, dynamic_loss_scale=True)
    begun = 0
    if resumes:
        begun = smp.resume_from_checkpoint(folder, tag=None, partial=True)["total_steps"]
    losses = []
    for number, ids in enumerate(batches()[begun:], begun + 1):
        rows = slice(smp.rdp_rank(), None, smp.rdp_size())
        optimizer.zero_grad(set_to_none=True)
        losses.append(train_step(model, ids[rows], torch.ones_like(ids[rows])).reduce_mean())
        if "sharded_data_parallel_degree" not in parameters:
            optimizer.clip_master_grads(1.0)
        optimizer.step()
        losses.append(torch.as_tensor(optimizer._global_grad_norm))
        if number == 2:
            content = {"total_steps": number}
            smp.save_checkpoint(
                folder, tag="total_steps2", partial=True, model=model, optimizer=optimizer, user_content=content
            )
    translated = smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2(model.state_dict(), max_seq_len=LENGTH)
    return torch.stack(losses), translated


def one_process():
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config())
    optimizer = adamw(model, nn.LayerNorm)
    found = []
    for ids in batches():
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)["loss"]
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
    return torch.stack(found), model.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_with_sagemakers_transformer_trains_as_one_process_and_goes_on_to_the_bit(tmp_path, layout):
    ranks, parameters = LAYOUTS[layout]
    expected, weights = one_process()
    sublayers = layout == "tp2"
    whole = on_ranks(script, ranks, parameters, tmp_path, False, sublayers)
    again = on_ranks(script, ranks, parameters, tmp_path, True, sublayers)
    found = torch.stack([losses for losses, _ in whole])
    if layout == "sdp2":
        found = found.mean(dim=0, keepdim=True)
    for losses in found:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for (losses, state), (rest, resumed) in zip(whole, again, strict=True):
        assert_same(state, weights, rtol=1e-4, atol=1e-5)
        assert torch.equal(rest, losses[2 * 2 :])
        assert_same(resumed, state)


def names_of(family):
    smp.init()
    kind = transformers.AutoModelForMaskedLM if family in ("bert", "roberta") else transformers.AutoModelForCausalLM
    before = kind.from_config(config(family))
    with smp.tensor_parallelism():
        model = kind.from_config(config(family))
    known = list(model.state_dict())
    smp.DistributedModel(before)
    smp.DistributedModel(model)
    assert list(model.state_dict()) == known
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    stacks = [part for part in (model, before) for part in part.modules() if hasattr(part, "seq_layers")]
    base = model.base_model
    assert stacks == [base.encoder if family in ("bert", "roberta") else base]
    assert {type(part) for part in model.modules() if isinstance(part, nn.LayerNorm)} == {FusedLayerNorm}
    assert not any(isinstance(part, FusedLayerNorm) for part in before.modules())
    if family == "gpt_neox":
        assert model.transformer is base
    for layer in stacks[0].seq_layers:
        assert {type(layer.attention), type(layer.output)} <= {type(part) for part in layer.children()}
    return len(stacks[0].seq_layers)


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gpt_neo", "gpt_neox", "bert", "roberta"])
def test_layers_have_sagemakers_names_too_where_its_library_would_replace_them(family):
    assert on_ranks(names_of, 1, family) == [2]
