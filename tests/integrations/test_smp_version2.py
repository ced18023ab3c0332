"""The published script of version 2 after the edits of docs/sagemaker.md: each of its calls is one of Accelerate's."""

import pytest
import torch
import transformers
from accelerate_checks import assert_same, fresh_accelerator, on_ranks, whole_state

VOCABULARY, LENGTH, STEPS = 48, 8, 4
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
KINDS = {
    "llama": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}
LAYOUTS = {
    "sdp2": (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
}


def created(family):
    transformers.set_seed(0)
    sizes = {**SIZES, **KINDS[family], "vocab_size": VOCABULARY, "use_cache": False, "tie_word_embeddings": False}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes))


def adamw(model):
    norms = {id(each) for name, each in model.named_parameters() if "norm" in name or name.endswith("bias")}
    decayed = [each for each in model.parameters() if id(each) not in norms]
    plain = [each for each in model.parameters() if id(each) in norms]
    groups = ({"params": decayed}, {"params": plain, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.2, eps=1e-3)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator) for _ in range(STEPS)]


def loop(smp, family, folder, resumes):
    accelerator = fresh_accelerator(smp)  # tsm.init()
    model = created(family)  # transform(model)
    optimizer = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)  # FSDP(model, ...)
    data_rank, data_size = accelerator.smp.data_rank, accelerator.smp.num_data_ranks  # dp_rank // tp
    found, begun = [], 0
    if resumes:
        accelerator.load_state(folder)
        begun = 2
    for number, ids in enumerate(batches()[begun:], begun):
        input_ids = ids[data_rank::data_size]
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=input_ids, attention_mask=None, labels=input_ids)["loss"]
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(torch.stack([accelerator.reduce(loss.detach(), "mean"), torch.as_tensor(norm)]))
        if number == 1 and not resumes:
            accelerator.save_state(folder)
    return torch.stack(found), whole_state(accelerator)


def one_process(family):
    model = created(family)
    optimizer = adamw(model)
    found = []
    for ids in batches():
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        found.append(torch.stack([loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)]))
        optimizer.step()
    return torch.stack(found), model.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", KINDS)
def test_the_edited_script_trains_as_in_one_process_and_goes_on_to_the_bit(tmp_path, family, layout):
    ranks, smp = LAYOUTS[layout]
    expected, weights = one_process(family)
    whole = on_ranks(loop, ranks, smp, family, tmp_path, False)
    again = on_ranks(loop, ranks, smp, family, tmp_path, True)
    for (found, _), (rest, _) in zip(whole, again, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(rest, found[2:])
    assert_same(whole[0][1], weights, rtol=1e-4, atol=1e-5)
    assert_same(again[0][1], whole[0][1])
