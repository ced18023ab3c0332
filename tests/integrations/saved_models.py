"""Tiny models of transformers and PEFT, their training on ranks, and a plain process that saves the same weights."""

import torch
from accelerate_checks import adamw, fresh_accelerator
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

VOCABULARY = 32
PP1 = {"pipeline_parallel_degree": 1}
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
LAYOUTS = {
    "pp2": (2, PP2),
    "sdp2": (2, {**PP1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    "tp2": (2, {**PP1, "tensor_parallel_degree": 2}),
    "pp2 x sdp2": (4, {**PP2, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
}


def gpt2(width=16):
    """Its head is tied to its embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=width, vocab_size=VOCABULARY, n_positions=16))


def _llama_sizes(width):
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3}
    return {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}


def llama(width=16):
    """Nothing is tied, and most weights are of half precision."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_llama_sizes(width)))


def mixtral(width=16):
    """Its experts are one tensor in memory, and tensors of their own in files."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**_llama_sizes(width), **experts))


def adapted(width=16):
    """A GPT-2 with adapters."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(gpt2(width), config)


def with_whole_parts(width=16):
    """A GPT-2 with adapters and two modules that PEFT saves whole, of which it asks for the names of their tensors."""
    torch.manual_seed(0)
    parts = {"target_modules": ["c_attn"], "modules_to_save": ["ln_f", "wpe"]}
    return get_peft_model(gpt2(width), LoraConfig(r=2, fan_in_fan_out=True, init_lora_weights=False, **parts))


MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "adapted": adapted, "with whole parts": with_whole_parts}


def trained(name, smp, width=16):
    """A model after a step, spread over the ranks."""
    accelerator = fresh_accelerator(smp)
    model = MODELS[name](width)
    model, optimizer = accelerator.prepare(model, adamw(model))
    tokens = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(accelerator.smp.data_rank))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model


def plain(name, weights, width=16):
    """The same model in one process."""
    model = MODELS[name](width)
    model.load_state_dict(weights)
    return model


def contents(folder):
    """All files of a folder, with their bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_files(found, expected, *, besides=()):
    found, expected = contents(found), contents(expected)
    assert sorted(found.keys() - set(besides)) == sorted(expected.keys() - set(besides))
    for name in expected.keys() - set(besides):
        assert found[name] == expected[name], name
