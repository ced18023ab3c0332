"""What is in a checkpoint of either form: what hooks have made of it, and what others can read and have written."""

import os
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning_toy import NEWER, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from omegaconf import OmegaConf
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from smp_strategy.errors import CheckpointError

callbacks = import_module(f"{NEWER}.callbacks")
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
SDP2 = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}
SHARDED = {"state_dict_type": "sharded"}


def fit(folder, smp, *user_callbacks, epochs=1, resume=None, save="end.ckpt", **overrides):
    """With the samples of one process, also where there are replicas."""
    module = toy_module(**overrides)
    options = {"use_distributed_sampler": False, "max_epochs": epochs}
    trainer = toy_trainer(folder, smp=smp, callbacks=list(user_callbacks), **options)
    trainer.fit(module, toy_loader(shuffle=False), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(folder / save)
    return trainer, module


def weights(module):
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def in_step(body):
    """Saved in the middle of a run, when the module is spread."""

    class Saving(callbacks.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            body(trainer)

    return Saving()


# Hooks of the user


def rename(self, checkpoint):
    state = checkpoint["state_dict"]
    assert state["net.0.weight"].shape == (16, 8)  # on all ranks
    state["first"] = state.pop("net.0.weight")
    del state["net.4.bias"]
    checkpoint["mine"] = {"epochs": self.current_epoch}


def rename_back(self, checkpoint):
    state = checkpoint["state_dict"]
    state["net.0.weight"] = state.pop("first")
    state["net.2.bias"] = state["net.2.bias"] * 2
    assert checkpoint["mine"] == {"epochs": 0}
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        group["weight_decay"] = 0.5


def edit(folder, smp):
    hooks = {"on_save_checkpoint": rename, "on_load_checkpoint": rename_back}
    saving = in_step(lambda trainer: trainer.save_checkpoint(folder / "edited.ckpt"))
    _, module = fit(folder, smp, saving, save=None, **hooks)
    before = weights(module)
    seen = []
    started = {"on_fit_start": lambda self: seen.append(weights(self))}
    module = toy_module(seed=1, strict_loading=False, **hooks, **started)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1)
    trainer.fit(module, toy_loader(shuffle=False), ckpt_path=folder / "edited.ckpt")
    return before, seen[0], trainer.optimizers[0].param_groups[0]["weight_decay"]


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
def test_hooks_may_rename_drop_and_change_what_is_saved_and_loaded(smp, form, tmp_path):
    for before, after, decay in on_ranks(edit, 2, tmp_path, {**smp, "state_dict_type": form}):
        other = toy_module(seed=1).state_dict()  # the bias that was dropped
        expected = {**before, "net.2.bias": before["net.2.bias"] * 2, "net.4.bias": other["net.4.bias"]}
        assert_same(after, expected)
        assert decay == 0.5


# Averages of weights


def average(folder, smp, kind, resume=False):
    made = {
        "EMA": lambda: callbacks.EMAWeightAveraging(decay=0.8),
        "SWA": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1),
    }[kind]
    saving = in_step(lambda trainer: trainer.save_checkpoint(folder / "average.ckpt"))
    _, module = fit(folder, smp, made(), saving, epochs=2, save=None)
    if resume:
        _, module = fit(folder, smp, made(), epochs=3, resume=folder / "average.ckpt", save=None)
    return weights(module)


@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_averages_are_stored_by_the_ranks_that_have_them(kind, smp, tmp_path):
    resume = kind == "EMA"
    with quiet():
        expected = average(tmp_path / "one", None, kind, resume)
    for found in on_ranks(average, 2, tmp_path / "smp", {**smp, **SHARDED}, kind, resume):
        assert_same(found, expected, rtol=1e-4, atol=1e-5)
    plain = torch.load(tmp_path / "one" / "average.ckpt", weights_only=True)
    whole = _load_distributed_checkpoint(tmp_path / "smp" / "average.ckpt")
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert (key in whole) == (key in plain)
        if key in plain:
            assert_same(whole[key], plain[key], rtol=1e-4, atol=1e-5)


# Others read and write


def save_both(folder, smp):
    """Right after each other, of a module that is spread."""

    def save(trainer):
        strategy = trainer.strategy
        trainer.save_checkpoint(folder / "sharded.ckpt")
        strategy.config = type(strategy.config).from_options(**{**smp, "state_dict_type": "full"})
        trainer.save_checkpoint(folder / "full.ckpt")

    fit(folder, {**smp, **SHARDED}, in_step(save), epochs=1, save=None)


def by_name(state, module):
    names = [name for name, _ in module.named_parameters()]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: kept for number, kept in state["state"].items()}, "param_groups": groups}


def test_lightnings_own_tools_read_a_directory(tmp_path):
    on_ranks(save_both, 2, tmp_path, PP2)
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    whole = _load_distributed_checkpoint(tmp_path / "sharded.ckpt")
    assert_same(whole.pop("state_dict"), full.pop("state_dict"))
    found, expected = whole.pop("optimizer_0"), by_name(*full.pop("optimizer_states"), toy_module())
    assert found["param_groups"] == expected["param_groups"]
    for name, kept in expected["state"].items():
        assert_same(found["state"][name], kept)
    whole.pop("smp_strategy"), full.pop("smp_strategy")  # what plain Lightning passes over
    names = [name for name, _ in toy_module().named_parameters()]
    assert full.pop("smp_strategy/parameter_names") == [[names]]
    assert whole == full
    dcp_to_torch_save(tmp_path / "sharded.ckpt", tmp_path / "torch.pt")
    assert_same(
        torch.load(tmp_path / "torch.pt")["state_dict"],
        _load_distributed_checkpoint(tmp_path / "sharded.ckpt")["state_dict"],
    )


def resumed(folder, smp, name):
    return weights(fit(folder, smp, epochs=2, resume=folder / name, save=None)[1])


def test_a_directory_that_lightning_has_written_is_resumed(tmp_path):
    """As its strategies FSDP and ModelParallel write it."""
    with quiet():
        fit(tmp_path, None, save="plain.ckpt")
        expected = resumed(tmp_path, None, "plain.ckpt")
    content = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    states = {f"optimizer_{n}": by_name(each, toy_module()) for n, each in enumerate(content.pop("optimizer_states"))}
    with quiet():
        dcp.save(
            {"state_dict": content.pop("state_dict"), **states}, checkpoint_id=tmp_path / "theirs.ckpt", no_dist=True
        )
    torch.save(content, tmp_path / "theirs.ckpt" / "meta.pt")
    for found in on_ranks(resumed, 2, tmp_path, PP2, "theirs.ckpt"):
        assert_same(found, expected, rtol=1e-5, atol=1e-6)
    # What their `consolidate_checkpoint` makes of it: the state of optimizers stays by name.
    torch.save(_load_distributed_checkpoint(tmp_path / "theirs.ckpt"), tmp_path / "consolidated.ckpt")
    for found in on_ranks(resumed, 2, tmp_path, PP2, "consolidated.ckpt"):
        assert_same(found, expected, rtol=1e-5, atol=1e-6)


# What may be in it


class Bomb:
    def __reduce__(self):
        return os.makedirs, (os.environ["BOMB"], 0o777, True)


def load_bomb(folder, smp, name, weights_only):
    trainer = toy_trainer(folder, smp=smp)
    trainer.test(toy_module(), toy_loader(), folder / name, verbose=False, weights_only=weights_only)


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("more", [{}, {"delayed_parameter_initialization": True}], ids=["", "delayed"])
def test_nothing_in_a_file_is_run_unless_it_is_trusted(form, more, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    on_ranks(save_both, 2, tmp_path, PP2)
    path = tmp_path / f"{form}.ckpt"
    rest, content = path, torch.load(tmp_path / "full.ckpt", weights_only=True)
    if form == "sharded":  # by others, who take no digests
        shutil.rmtree(path)
        with quiet():
            dcp.save({"state_dict": content.pop("state_dict")}, checkpoint_id=path, no_dist=True)
        rest = path / "meta.pt"
    torch.save({**content, "bomb": Bomb()}, rest)
    with pytest.raises(RuntimeError, match=f"CheckpointError: .*{rest.name}(?s:.)*weights_only"):
        on_ranks(load_bomb, 2, tmp_path, {**PP2, **more}, path.name, None)
    assert not (tmp_path / "exploded").exists()
    if more:  # Lightning does not hand on what it is told then
        on_ranks(load_bomb, 2, tmp_path, {**PP2, **more, "checkpoint_weights_only": False}, path.name, None)
    else:
        on_ranks(load_bomb, 2, tmp_path, PP2, path.name, False)
    assert (tmp_path / "exploded").exists()


def with_config(self, checkpoint):
    checkpoint["hyper_parameters"] = OmegaConf.create({"layers": [1, 2], "name": "${layers}", "path": Path("data")})
    checkpoint["hparams_type"] = type(checkpoint["hyper_parameters"])


def read_config(folder, smp):
    seen = []
    saving = in_step(lambda trainer: trainer.save_checkpoint(folder / "config.ckpt"))
    fit(folder, smp, saving, save=None, on_save_checkpoint=with_config)
    module = toy_module(on_load_checkpoint=lambda self, checkpoint: seen.append(checkpoint["hyper_parameters"]))
    toy_trainer(folder, smp=smp).test(module, toy_loader(), ckpt_path=folder / "config.ckpt", verbose=False)
    return seen[0].name[1], seen[0].path


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("more", [{}, {"delayed_parameter_initialization": True}], ids=["", "delayed"])
def test_hyper_parameters_of_hydra_applications_are_loaded(form, more, tmp_path):
    smp = {**PP2, **more, "state_dict_type": form}
    assert on_ranks(read_config, 2, tmp_path, smp) == [(2, Path("data"))] * 2


# Where it is


class Renaming(TorchCheckpointIO):
    """A plugin of the user."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, f"{path}.mine")

    def load_checkpoint(self, path, **options):
        return super().load_checkpoint(f"{path}.mine", **options)

    def remove_checkpoint(self, path):
        super().remove_checkpoint(f"{path}.mine")


def through_plugin(folder, smp, later):
    kept = callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=1)
    module, options = toy_module(), {"enable_checkpointing": True, "plugins": [Renaming()], "callbacks": [kept]}
    trainer = toy_trainer(folder, smp={**smp, "async_save": later}, **options)
    trainer.fit(module, toy_loader(shuffle=False))
    # In one order: a mean over the same batches in another one differs in its last bits.
    before = trainer.test(module, toy_loader(shuffle=False), verbose=False)
    return before == trainer.test(module, toy_loader(shuffle=False), ckpt_path="best", verbose=False)


@pytest.mark.parametrize("later", [False, True])
def test_plugins_of_the_user_read_and_write_files(later, tmp_path):
    assert on_ranks(through_plugin, 2, tmp_path, PP2, later) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1.ckpt.mine"]


def in_memory(smp):
    _, module = fit(Path("/nowhere"), smp, save=None)
    trainer = module.trainer
    trainer.save_checkpoint("memory://folder/end.ckpt")
    if trainer.is_global_zero:
        return TorchCheckpointIO().load_checkpoint("memory://folder/end.ckpt", weights_only=True)["global_step"]
    return None


def test_a_file_is_written_to_any_storage_that_fsspec_knows():
    assert on_ranks(in_memory, 2, PP2) == [6, None]


def refuse(folder, smp, path, **options):
    trainer = toy_trainer(folder, smp={**smp, **SHARDED}, max_epochs=1, **options)
    trainer.fit(toy_module(), toy_loader())
    trainer.save_checkpoint(path)


def test_a_directory_is_not_written_by_plugins(tmp_path):
    for options in ({}, {"enable_checkpointing": True}):
        with pytest.raises(RuntimeError, match="UnsupportedError: .*full"):
            on_ranks(refuse_with, 2, tmp_path, PP2, tmp_path / "end.ckpt", {"plugins": [Renaming()], **options})
    assert not list(tmp_path.iterdir())


def test_a_directory_is_not_written_to_the_memory_of_one_rank(tmp_path):
    with pytest.raises(RuntimeError, match="__1_0.distcp: not there, or not seen from here"):
        on_ranks(refuse_with, 2, tmp_path, PP2, "memory://folder/end.ckpt", {})


def refuse_with(folder, smp, path, options):
    refuse(folder, smp, path, **options)


FOREIGN = {
    "list.ckpt": "has an object of the class list instead of a dict, so it is none of Lightning's checkpoints",
    "inside.ckpt": "is no dict of weights by their names, but an object of the class list",
    "other.ckpt": "has no `state_dict`, so it is none of Lightning's checkpoints (there are 'model')",
    "notes": "is a folder, but no checkpoint of Lightning's. Give a file or a folder that",
    "weights": "is a folder, but no checkpoint of Lightning's. It is a folder with weights, as Hugging Face has them.",
}


def foreign(folder, smp):
    """What is said of files and folders of others."""
    found = []
    for name in FOREIGN:
        try:
            toy_trainer(folder, smp=smp, max_epochs=1).fit(toy_module(), toy_loader(), ckpt_path=folder / name)
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_what_others_have_written_is_refused_by_its_name(tmp_path):
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save({"state_dict": [1, 2]}, tmp_path / "inside.ckpt")
    torch.save({"model": {}}, tmp_path / "other.ckpt")
    for name, file in (("notes", "readme.txt"), ("weights", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"")
    for found in on_ranks(foreign, 2, tmp_path, PP2):
        for text, (name, expected) in zip(found, FOREIGN.items(), strict=True):
            assert f"{tmp_path / name} {expected}" in text
