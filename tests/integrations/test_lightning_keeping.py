"""ModelCheckpoint keeps, links, deletes and finds again what it does in one process: in both forms, now and later."""

import os
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_toy import on_ranks, quiet, toy_loader, toy_module, toy_trainer

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.engine.saving.async_saves import AsyncSaves

LOSSES = (0.5, 0.3, 0.4, 0.2)  # of epochs
FORMS = [{}, {"async_save": True}, {"state_dict_type": "sharded"}, {"state_dict_type": "sharded", "async_save": True}]
NAMES = ["full", "full, async", "sharded", "sharded, async"]


def validate(self, batch, batch_idx):
    self.log("val_loss", torch.tensor(LOSSES[self.current_epoch % 4]))


def fit(folder, smp, *keeping, epochs=4, resume=None, **overrides):
    module = toy_module(validation_step=validate, **overrides)
    kept = [ModelCheckpoint(dirpath=folder / f"{number}", **options) for number, options in enumerate(keeping)]
    trainer = toy_trainer(folder, smp=smp, max_epochs=epochs, callbacks=kept, enable_checkpointing=True)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False, batch_size=16), ckpt_path=resume)
    return trainer, module


def listed(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.ckpt"))


KEEPING = (
    {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}"},
    {"monitor": "val_loss", "mode": "max", "save_top_k": 1, "save_last": "link", "filename": "worst"},
    {"every_n_train_steps": 4, "save_top_k": -1, "filename": "same"},
    {"save_top_k": 1, "save_weights_only": True},
)


def keep(folder, smp):
    trainer, module = fit(folder, smp, *KEEPING)
    first = trainer.checkpoint_callbacks[0]
    best = Path(first.best_model_path).relative_to(folder)
    last = os.readlink(folder / "1" / "last.ckpt")
    loader = toy_loader(shuffle=False)
    tested = [trainer.test(module, loader, ckpt_path=path, verbose=False) for path in ("best", "last")]
    trainer.validate(module, toy_loader(shuffle=False), ckpt_path="best", verbose=False)
    predicted = trainer.predict(module, toy_loader(shuffle=False), ckpt_path="best")
    return listed(folder), str(best), last, tested, torch.cat(predicted)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with quiet():
        return keep(tmp_path_factory.mktemp("plain"), None)


@pytest.mark.dear
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_the_same_checkpoints_are_kept_as_in_one_process(form, tmp_path, plain):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 4, **form}
    for names, best, last, tested, predicted in on_ranks(keep, 2, tmp_path, smp):
        assert (names, best, last) == plain[:3]
        assert tested == [[pytest.approx(each, rel=1e-5) for each in losses] for losses in plain[3]]
        torch.testing.assert_close(predicted, plain[4], rtol=1e-4, atol=1e-5)
    assert all(path.is_dir() == (form.get("state_dict_type") == "sharded") for path in tmp_path.glob("*/*.ckpt"))
    assert not list(tmp_path.glob("*/.*")), "exposed"


# Later


ASYNC = {"pipeline_parallel_degree": 2, "microbatches": 4, "async_save": True}


class Slow:
    """Writing takes so long that training does something meanwhile, and fails from the third checkpoint on."""

    def __init__(self, folder, monkeypatch, fails=False):
        self.folder, self.fails, self.seen, save = folder, fails, [], AsyncSaves.save

        def slow_save(saves, path, write):
            def slowly():
                time.sleep(0.5)
                self.seen.append((path.name, listed(folder)))
                if self.fails and len(self.seen) > 2:
                    raise OSError("no space left on device")
                write()

            save(saves, path, slowly)

        monkeypatch.setattr(AsyncSaves, "save", slow_save)


class Logger(CSVLogger):
    """Notes what it finds when it is told of a checkpoint."""

    def after_save_checkpoint(self, callback):
        self.found = [*getattr(self, "found", []), Path(callback.best_model_path).exists()]


def save_slowly(folder, smp, fails=False):
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow = Slow(folder, monkeypatch, fails)
        steps = []
        keep_last = {"every_n_train_steps": 2, "save_top_k": 1, "filename": "{step}", "save_last": "link"}
        module = toy_module(on_train_batch_start=lambda self, batch, index: steps.append(listed(folder)))
        kept = ModelCheckpoint(dirpath=folder / "0", **keep_last)
        logger = Logger(folder)
        trainer = toy_trainer(folder, smp=smp, callbacks=[kept], enable_checkpointing=True, max_epochs=2, logger=logger)
        error = None
        try:
            trainer.fit(module, toy_loader(shuffle=False))
        except Exception as raised:  # on rank 1 that rank 0 has ended
            error = str(raised)
        return slow.seen, steps, logger.__dict__.get("found"), error, trainer.global_step


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_checkpoint_is_deleted_when_the_next_one_is_there(form, tmp_path):
    results = on_ranks(save_slowly, 2, tmp_path, {**ASYNC, "state_dict_type": form})
    seen, steps, told, error, _ = results[0]
    assert error is None
    names = [f"step={step}.ckpt" for step in (2, 4, 6, 8, 10, 12)]
    assert [name for name, _ in seen] == names
    for before, (_, there) in zip([[], *([name, "last.ckpt"] for name in names)], seen, strict=False):
        assert there == sorted(f"0/{name}" for name in before)
    assert [] in steps[2:], "training went on"
    assert told == [True] * len(names)
    assert listed(tmp_path) == ["0/last.ckpt", "0/step=12.ckpt"]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_an_error_in_the_background_stops_the_run_and_the_checkpoint_before_stays(form, tmp_path):
    """Of all ranks: all of them write a directory, and one rank writes a file."""
    results = on_ranks(save_slowly, 2, tmp_path, {**ASYNC, "state_dict_type": form}, True)
    assert "no space left" in results[0][3]
    assert results[0][4] < 12
    assert listed(tmp_path) == ["0/last.ckpt", "0/step=4.ckpt"]
    assert (tmp_path / "0" / "last.ckpt").resolve().name == "step=4.ckpt"


# At the end


def stop(folder, smp, where, who):
    """An error in a hook, or in a step, of some ranks; and the checkpoint that a callback wants of it."""

    def fail(self, *args):
        if self.trainer.global_step == 3 and self.trainer.global_rank in who:
            raise ValueError("enough")
        return getattr(type(self).__mro__[1], where)(self, *args)

    module = toy_module(**{where: fail})
    kept = ModelCheckpoint(dirpath=folder / "0", filename="{step}", every_n_train_steps=2, save_on_exception=True)
    trainer = toy_trainer(folder, smp=smp, callbacks=[kept], enable_checkpointing=True)
    began = time.monotonic()
    try:
        trainer.fit(module, toy_loader(shuffle=False))
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return None


STOPS = {
    "all between steps": ("on_train_batch_start", (0, 1), ["0/step=2.ckpt", "0/step=3.ckpt"]),
    "one between steps": ("on_train_batch_start", (1,), ["0/step=2.ckpt"]),
    "all in a step": ("training_step", (0, 1), ["0/step=2.ckpt"]),
}


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("name", STOPS)
def test_of_an_error_a_checkpoint_is_saved_if_all_ranks_have_stopped_between_steps(name, form, tmp_path):
    where, who, names = STOPS[name]
    smp = {"pipeline_parallel_degree": 2, "microbatches": 4, "state_dict_type": form}
    found = on_ranks(stop, 2, tmp_path, smp, where, who)
    assert all(found[rank][0] == "ValueError" for rank in who), "the error itself, as without checkpoints"
    assert all(seconds < 30 for _, seconds in found), "nobody waits for ever"
    assert listed(tmp_path) == names


def save_last(folder, smp):
    fit(folder, smp, {"save_last": True, "filename": "x"}, epochs=1)


def resume_last(folder, smp, path):
    kept = ModelCheckpoint(dirpath=folder, save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [kept], "max_epochs": 2, "default_root_dir": folder}
    trainer = toy_trainer(folder, smp=smp, **options)
    trainer.fit(toy_module(), toy_loader(shuffle=False), ckpt_path=path)
    return Path(trainer.ckpt_path).name, trainer.global_step


@pytest.mark.parametrize(("path", "name"), [("last", "last.ckpt"), ("hpc", "hpc_ckpt_7.ckpt")])
def test_the_last_checkpoint_is_found_after_a_save_that_was_killed(path, name, tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 4, "state_dict_type": "sharded"}
    on_ranks(save_last, 2, tmp_path, smp)
    folder = tmp_path / "0"
    # The old one was moved aside, and the new one has not arrived.
    (folder / "last.ckpt").rename(folder / f".{name}.replaced")
    commit.begin(folder / "hpc_ckpt_8.ckpt", is_folder=True)
    assert on_ranks(resume_last, 2, folder, smp, path) == [(name, 12)] * 2
