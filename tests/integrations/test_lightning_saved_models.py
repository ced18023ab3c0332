"""``save_pretrained`` of models in a LightningModule: the files of one plain process, in a hook and after the run."""

import pytest
import torch
from accelerate_checks import assert_same
from lightning_toy import on_ranks, quiet, toy_module, toy_trainer
from saved_models import LAYOUTS, MODELS, VOCABULARY, assert_same_files
from torch import nn
from torch.utils.data import DataLoader

HOOKS = {"after the run": None, "in a hook": "on_train_end"}


class OfOthers(nn.Module):
    """A model as of diffusers or of the Hub's mixin: its own ``save_pretrained`` asks for its ``state_dict``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 16), *(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, input_ids):
        return self.layers(input_ids)

    def save_pretrained(self, save_directory):
        save_directory.mkdir(parents=True)
        torch.save(self.state_dict(), save_directory / "weights.bin")


class WithParts(nn.Module):
    """A model of transformers in one of the user's, as under a head."""

    def __init__(self):
        super().__init__()
        self.inner = MODELS["llama"]()

    def forward(self, **inputs):
        return self.inner(**inputs)


MAKERS = {**MODELS, "of others": OfOthers, "in another": WithParts}


def saved(model, folder, name):
    if name == "in another":
        model = model.inner
    model.save_pretrained(folder)
    if name in ("gpt2", "in another"):
        model.save_pretrained(folder / "many", max_shard_size="5KB")
        if name == "gpt2":
            model.transformer.save_pretrained(folder / "part")
        (folder / "one").mkdir(parents=True, exist_ok=True)
        (folder / "one" / "count").write_text(str(model.num_parameters()))


def fit_and_save(folder, name, smp, restore, hook):
    def training_step(self, batch, batch_idx):
        if name == "of others":
            return self.model(batch).square().mean()
        return self.model(input_ids=batch, labels=batch).loss

    hooks = {} if hook is None else {hook: lambda self: saved(self.model, folder / "smp", name)}
    module = toy_module(training_step=training_step, on_train_batch_start=lambda *_: None, **hooks)
    del module.net
    torch.manual_seed(0)
    module.model = MAKERS[name]()
    tokens = torch.randint(VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(0))
    trainer = toy_trainer(folder, smp={**smp, "restore_module": restore}, max_epochs=1)
    trainer.fit(module, DataLoader(tokens, batch_size=4))
    if hook is None:
        saved(module.model, folder / "smp", name)
    trainer.save_checkpoint(folder / "end.ckpt")


@pytest.mark.parametrize(("when", "restore"), [*((when, "none") for when in HOOKS), ("after the run", "rank_zero")])
@pytest.mark.parametrize("name", ["gpt2", "adapted", "of others", "in another"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_of_one_process(layout, name, restore, when, tmp_path):
    world_size, smp = LAYOUTS[layout]
    on_ranks(fit_and_save, world_size, tmp_path, name, smp, restore, HOOKS[when])
    weights = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    weights = {key.removeprefix("model."): value for key, value in weights.items()}
    with quiet():
        torch.manual_seed(0)
        model = MAKERS[name]()
        first = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(weights)
    assert any(not torch.equal(value, first[key]) for key, value in weights.items())
    saved(model, tmp_path / "plain", name)
    if name == "of others":  # the order of entries and the ids in a pickle are torch's
        found, expected = (torch.load(tmp_path / each / "weights.bin") for each in ("smp", "plain"))
        assert_same(found, expected)
        return
    assert_same_files(tmp_path / "smp", tmp_path / "plain")
