"""Hugging Face models with their layers split over ranks compute what they compute as a whole."""

import dataclasses
from pathlib import Path

import pytest

from .huggingface.split import compare_split
from .huggingface.table import ARCHITECTURES

TOLERANCE = 1e-5
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_heads": 4, "head_dim": 4, "d_kv": 4}

# Layers that stay whole, of all with matrices; the others are split.
WHOLE: dict[str, set[str]] = {
    "GPT2LMHeadModel": {"wpe"},
    "GPTNeoXForCausalLM": set(),
    "GPTJForCausalLM": set(),
    "GPTNeoForCausalLM": {"wpe"},
    "LlamaForCausalLM": set(),
    "MistralForCausalLM": set(),
    "Qwen2ForCausalLM": set(),
    "Qwen3ForCausalLM": set(),
    "GemmaForCausalLM": set(),
    "MixtralForCausalLM": {"gate", "experts"},
    "PhiForCausalLM": set(),
    "OPTForCausalLM": {"embed_positions"},
    "BertForMaskedLM": {"position_embeddings", "token_type_embeddings", "transform.dense"},
    "RobertaForMaskedLM": {"position_embeddings", "token_type_embeddings", "lm_head.dense"},
    "ViTForImageClassification": {"embeddings", "projection", "classifier"},
    "T5ForConditionalGeneration": set(),
}
KNOWN = [each for each in ARCHITECTURES if each.name in WHOLE]
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("architecture", KNOWN, ids=str)
def test_a_split_model_has_the_loss_and_the_gradients_of_the_dense_one(architecture, num_ranks):
    if num_ranks == 4:
        heads = dict(FOUR_HEADS)
        if architecture.name == "GPTJForCausalLM":
            heads["rotary_dim"] = 2
        architecture = dataclasses.replace(architecture, options={**architecture.options, **heads})
    found = compare_split(architecture, num_ranks)
    assert found.difference <= TOLERANCE, found.where
    assert not found.apart
    assert found.is_named_alike
    assert found.is_dense_again
    whole = {line.name for line in found.report.lines if not line.is_split and line.why != "has vectors only"}
    whole = {name for name in whole if "norm" not in name}
    assert all(any(name.endswith(end) for end in WHOLE[architecture.name]) for name in whole), whole


def test_every_model_of_the_list_is_compared():
    assert {each.name for each in KNOWN} == WHOLE.keys()


def test_the_report_in_the_documentation_is_that_of_gpt2():
    (gpt2,) = [each for each in KNOWN if each.name == "GPT2LMHeadModel"]
    assert str(compare_split(gpt2, 2).report) in DOCUMENTATION.read_text()


@pytest.mark.parametrize("dim", [0, 1], ids=["samples", "tokens"])
@pytest.mark.parametrize("architecture", KNOWN, ids=str)
def test_its_stream_may_be_split_as_well(architecture, dim):
    found = compare_split(architecture, 2, stream_dim=dim)
    assert found.difference <= TOLERANCE, found.where
    assert not found.apart
    assert found.is_dense_again
