"""`offload_activations` under the Trainer: the numbers without it, in fit, in mixed precision and in manual steps."""

import pytest
import torch
from lightning_toy import on_ranks
from test_lightning_manual import fit as fit_manually
from test_lightning_parity import MODELS, train
from transformers import GPT2Config

from hf_gpt2 import LanguageModel
from optimization import Recipe

OFFLOAD = {"offload_activations": True, "offload_min_bytes": "1KiB", "activation_loading_horizon": 1}


class Watched(LanguageModel):
    """Fails unless something has gone out in each step of the first stage."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        strategy = self.trainer.strategy
        if strategy.config.offload_activations and strategy.mesh.stage == 0:  # whose microbatches wait
            assert strategy.engine.traffic.bytes_out > 0


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
@pytest.mark.parametrize("treatment", [{}, {"activation_checkpointing": "all"}], ids=["kept", "computed again"])
def test_a_run_with_dropout_has_the_weights_without_offload(treatment, pp, tmp_path):
    smp = {"pipeline_parallel_degree": pp, "microbatches": 8, "pipeline": "simple"}
    expected = on_ranks(train, pp, tmp_path / "kept", "GPT-2", gpt2_with_dropout, smp)[0]
    found = on_ranks(train, pp, tmp_path / "out", "GPT-2", gpt2_with_dropout, smp | OFFLOAD | treatment)[0]
    assert_same(found, expected)


def test_a_run_in_stages_has_the_weights_of_plain_lightning(tmp_path):
    expected = on_ranks(train, 1, tmp_path / "one", "byte-level GPT", MODELS["byte-level GPT"], None)[0]
    smp = {"pipeline_parallel_degree": 2, "microbatches": 8, **OFFLOAD}
    assert_same(on_ranks(train, 2, tmp_path / "smp", "byte-level GPT", MODELS["byte-level GPT"], smp)[0], expected)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", ["GAN", "two losses"])
def test_manual_steps_have_the_weights_without_offload(name, pp, tmp_path):
    smp = {"pipeline_parallel_degree": pp, "microbatches": 2}
    offload = OFFLOAD | {"offload_min_bytes": 0}
    expected = on_ranks(fit_manually, pp, tmp_path / "kept", name, smp, {})[0]
    assert_same(
        on_ranks(fit_manually, pp, tmp_path / "out", name, smp | offload, {})[0]["weights"], expected["weights"]
    )


def test_mixed_precision_has_the_weights_without_offload(tmp_path):
    smp, options = {"pipeline_parallel_degree": 2, "microbatches": 2}, {"precision": "bf16-mixed"}
    offload = OFFLOAD | {"offload_min_bytes": 0}
    expected = on_ranks(fit_manually, 2, tmp_path / "kept", "GAN", smp, options)[0]
    found = on_ranks(fit_manually, 2, tmp_path / "out", "GAN", smp | offload, options)[0]
    assert_same(found["weights"], expected["weights"])
