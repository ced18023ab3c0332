"""Activations that are computed again or wait on the host: the numbers of everything kept, in fit and manual steps."""

import pytest
import torch
from lightning_toy import on_ranks
from test_lightning_manual import fit as fit_manually
from test_lightning_parity import MICROBATCHES, MODELS, train
from transformers import GPT2Config

from hf_gpt2 import LanguageModel
from optimization import Recipe
from smp_strategy.activations.checkpoint import Recomputed

AGAIN = {"activation_checkpointing": "all"}
OFFLOAD = {"offload_activations": True, "offload_min_bytes": "1KiB", "activation_loading_horizon": 1}
WAYS = {
    "kept": {},
    "each computed again": AGAIN,
    "contiguous": {**AGAIN, "checkpoint_strategy": "contiguous"},
    "selective": {**AGAIN, "selective_checkpointing": True},
    "attention": {"activation_checkpointing": "GPT2Attention"},
    "on the host": OFFLOAD,
    "inputs on the host": {**AGAIN, **OFFLOAD},
}
MANUAL_WAYS = {
    "kept": {},
    "each computed again": AGAIN,
    "selective": WAYS["selective"],
    "on the host": {**OFFLOAD, "offload_min_bytes": 0},
}


class Watched(LanguageModel):
    """Fails unless in each step something was computed again, or has gone out from the first stage, as it was told."""

    def on_fit_start(self):
        self.runs, self.run = [], Recomputed.call

        def noted(call, args, kwargs):
            self.runs.append(call)
            return self.run(call, args, kwargs)

        Recomputed.call = noted

    def on_train_batch_end(self, outputs, batch, batch_idx):
        strategy = self.trainer.strategy
        assert bool(self.runs) == (strategy.config.activation_checkpointing != "none")
        self.runs.clear()
        if strategy.config.offload_activations and strategy.mesh.stage == 0:  # whose microbatches wait
            assert strategy.engine.inspection.traffic.bytes_out > 0

    def on_fit_end(self):
        Recomputed.call = self.run


def gpt2_with_dropout():
    config = GPT2Config(
        vocab_size=256, n_positions=17, n_layer=4, n_head=2, n_embd=32, tie_word_embeddings=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Watched(config, Recipe(lr=1e-2, warmup_steps=5, weight_decay=0.1))


def assert_same(found, expected, way=None):
    assert list(found) == list(expected), way
    for key, value in expected.items():
        assert torch.equal(found[key], value), (way, key)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_dropout_has_the_weights_of_everything_kept_on_one_rank(way, pp, tmp_path):
    def run(ranks, options):
        smp = {"microbatches": 4, "pipeline": "simple", "pipeline_parallel_degree": ranks, **options}
        return on_ranks(train, ranks, tmp_path / str(ranks), "GPT-2", gpt2_with_dropout, smp, steps=4)[0]

    assert_same(run(pp, WAYS[way]), run(1, WAYS["kept"]))


@pytest.mark.parametrize("way", ["contiguous", "on the host"])
def test_a_run_in_stages_has_the_weights_of_plain_lightning(way, tmp_path):
    expected = on_ranks(train, 1, tmp_path / "one", "byte-level GPT", MODELS["byte-level GPT"], None)[0]
    smp = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, **WAYS[way]}
    assert_same(on_ranks(train, 2, tmp_path / "smp", "byte-level GPT", MODELS["byte-level GPT"], smp)[0], expected)


def fit_each_way(folder, name, smp, options):
    return {way: fit_manually(folder / way, name, smp | more, options) for way, more in MANUAL_WAYS.items()}


@pytest.mark.parametrize(("pp", "precision"), [(1, "32-true"), (2, "32-true"), (2, "bf16-mixed")])
@pytest.mark.parametrize("name", ["GAN", "two losses"])
def test_manual_steps_have_the_weights_of_everything_kept(name, pp, precision, tmp_path):
    smp = {"pipeline_parallel_degree": pp, "microbatches": 2}
    found = on_ranks(fit_each_way, pp, tmp_path, name, smp, {"precision": precision})[0]
    for way, result in found.items():
        assert_same(result["weights"], found["kept"]["weights"], way)
