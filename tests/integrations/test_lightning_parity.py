"""Eight steps of the examples' LightningModules: the weights of Lightning's plain strategy, bit for bit.

The modules are those of ``examples/``, untouched. The reference is the single-device strategy that accumulates over
the same microbatches; clipping by the global norm is on.
"""

import pytest
import torch
from lightning_toy import on_ranks, quiet, toy_trainer
from torch.utils.data import DataLoader
from transformers import GPT2Config, ViTConfig

from gpt import GPT
from gpt import LanguageModel as ByteModel
from hf_gpt2 import LanguageModel as HuggingFaceModel
from optimization import Recipe
from vision import DigitsData, ImageClassifier

STEPS, BATCH, MICROBATCHES = 8, 16, 4


def byte_model(*, tied=False):
    return ByteModel(GPT(context=16, layers=4, heads=2, width=32, tied=tied), recipe())


def gpt2(*, tied=False):
    config = GPT2Config(
        vocab_size=256, n_positions=17, n_layer=4, n_head=2, n_embd=32, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return HuggingFaceModel(config, recipe())


def vit():
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=32, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ImageClassifier(config, recipe())


MODELS = {"byte-level GPT": byte_model, "GPT-2": gpt2, "ViT": vit}


def recipe():
    return Recipe(lr=1e-2, warmup_steps=5, weight_decay=0.1)


def samples(name):
    if name == "ViT":
        data = DigitsData(batch_size=1)
        data.setup("fit")
        return data.train
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (STEPS * BATCH, 17), generator=generator)


def train(folder, name, make, smp, window=1, steps=STEPS):
    torch.manual_seed(0)
    module = make()
    if smp is None:
        options = {"accumulate_grad_batches": window * MICROBATCHES}
        batch_size = BATCH // MICROBATCHES
    else:
        options, batch_size = {"accumulate_grad_batches": window}, BATCH
    trainer = toy_trainer(folder, smp=smp, max_steps=steps, max_epochs=-1, gradient_clip_val=1.0, **options)
    trainer.fit(module, DataLoader(samples(name), batch_size=batch_size, shuffle=False))
    trainer.save_checkpoint(folder / "end.ckpt")
    return torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_steps_give_identical_weights(name, pp, tmp_path):
    with quiet():
        expected = train(tmp_path / "one", name, MODELS[name], None)
    smp = {"pipeline_parallel_degree": pp, "microbatches": MICROBATCHES}
    found = on_ranks(train, pp, tmp_path / "smp", name, MODELS[name], smp)[0]
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


# Four steps of three batches go on into a second epoch: the last step of the first has two.
@pytest.mark.dear
@pytest.mark.parametrize(("pp", "window"), [(2, 3), (4, 2)])
def test_accumulated_batches_give_identical_weights(pp, window, tmp_path):
    with quiet():
        expected = train(tmp_path / "one", "GPT-2", gpt2, None, window, STEPS // 2)
    smp = {"pipeline_parallel_degree": pp, "microbatches": MICROBATCHES}
    found = on_ranks(train, pp, tmp_path / "smp", "GPT-2", gpt2, smp, window, STEPS // 2)[0]
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


class WithSGD(Recipe):
    def build(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.05)


def tied_gpt2_with_sgd():
    module = gpt2(tied=True)
    module.optimization = WithSGD(lr=0.05, warmup_steps=0, weight_decay=0.0)
    return module


@pytest.mark.parametrize("pp", [2, 4])
def test_weights_tied_across_stages_stay_within_the_stated_bound(pp, tmp_path):
    with quiet():
        expected = train(tmp_path / "one", "GPT-2", tied_gpt2_with_sgd, None)
    smp = {"pipeline_parallel_degree": pp, "microbatches": MICROBATCHES}
    found = on_ranks(train, pp, tmp_path / "smp", "GPT-2", tied_gpt2_with_sgd, smp)[0]
    assert torch.equal(found["model.lm_head.weight"], found["model.transformer.wte.weight"])
    for key, value in expected.items():
        assert (found[key] - value).norm() <= 1e-6 * value.norm(), key
