"""`activation_checkpointing` under the Trainer: the numbers without it, in fit, mixed precision and manual steps."""

import pytest
import torch
from lightning_toy import on_ranks
from test_lightning_manual import fit as fit_manually
from test_lightning_parity import MODELS, train
from transformers import GPT2Config

from hf_gpt2 import LanguageModel
from optimization import Recipe
from smp_strategy.activations.recompute import Recomputed

WAYS = {
    "each": {"activation_checkpointing": "all"},
    "contiguous": {"activation_checkpointing": "all", "checkpoint_strategy": "contiguous"},
    "selective": {"activation_checkpointing": "all", "selective_checkpointing": True},
    "attention": {"activation_checkpointing": "GPT2Attention"},
}


class Watched(LanguageModel):
    """Fails unless something has been computed again in each step."""

    def on_fit_start(self):
        self.runs, run = [], Recomputed.call

        def noted(call, args, kwargs):
            self.runs.append(call)
            return run(call, args, kwargs)

        Recomputed.call = noted

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert bool(self.runs) == (self.trainer.strategy.config.activation_checkpointing != "none")
        self.runs.clear()


def gpt2_with_dropout():
    config = GPT2Config(
        vocab_size=256, n_positions=17, n_layer=4, n_head=2, n_embd=32, tie_word_embeddings=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Watched(config, Recipe(lr=1e-2, warmup_steps=5, weight_decay=0.1))


def assert_same(found, expected):
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_dropout_has_the_weights_without_recomputation(way, pp, tmp_path):
    smp = {"pipeline_parallel_degree": pp, "microbatches": 4}
    expected = on_ranks(train, 1, tmp_path / "kept", "GPT-2", gpt2_with_dropout, smp | {"pipeline_parallel_degree": 1})[
        0
    ]
    found = on_ranks(train, pp, tmp_path / "again", "GPT-2", gpt2_with_dropout, smp | WAYS[way])[0]
    assert_same(found, expected)


def test_a_run_in_stages_has_the_weights_of_plain_lightning(tmp_path):
    expected = on_ranks(train, 1, tmp_path / "one", "byte-level GPT", MODELS["byte-level GPT"], None)[0]
    smp = {"pipeline_parallel_degree": 2, "microbatches": 8, **WAYS["contiguous"]}
    assert_same(on_ranks(train, 2, tmp_path / "smp", "byte-level GPT", MODELS["byte-level GPT"], smp)[0], expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("way", ["each", "selective"])
@pytest.mark.parametrize("name", ["GAN", "two losses"])
def test_manual_steps_have_the_weights_without_recomputation(name, way, precision, tmp_path):
    smp, options = {"pipeline_parallel_degree": 2, "microbatches": 2}, {"precision": precision}
    expected = on_ranks(fit_manually, 2, tmp_path / "kept", name, smp, options)[0]
    found = on_ranks(fit_manually, 2, tmp_path / "again", name, smp | WAYS[way], options)[0]
    assert_same(found["weights"], expected["weights"])
