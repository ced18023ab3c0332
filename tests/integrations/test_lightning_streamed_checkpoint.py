"""Full checkpoints that no rank has as a whole: their bytes are those of a save that collects all; memory; errors."""

import errno
import time
import zipfile
from importlib import import_module

import pytest
import torch
from lightning_toy import NEWER, on_ranks, toy_loader, toy_module, toy_trainer
from torch import nn
from torch.utils.data import TensorDataset

from smp_strategy.checkpoint import full_state_dict
from smp_strategy.checkpoint.storage.full_file import verify_full
from smp_strategy.checkpoint.torch_file import _LaidOutFile
from smp_strategy.distributed import deadlock as watch
from smp_strategy.errors import SMPError
from smp_strategy.integrations.lightning import make_strategy

callbacks = import_module(f"{NEWER}.callbacks")
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}
LAYOUTS = {
    "pp2": (2, PP2),
    "sdp2": (2, SDP2),
    "tp2": (2, {"tensor_parallel_degree": 2, "tensor_parallel": {f"net.{n}": "column" for n in (0, 3, 5, 7)}}),
    "pp2 x dp2": (4, {**PP2, "shard_optimizer_state": True}),
    "state dealt out": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
    "pp2 with masters": (2, {**PP2, "bf16": True}),
    "sdp2 with masters": (2, {**SDP2, "bf16": True}),
}


class Opaque:
    """Has a tensor that is in no dict."""

    def __init__(self, tensor):
        self.tensor = tensor


class Noted(nn.Module):
    """Extra state and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 2))

    def forward(self, inputs):
        return inputs

    def get_extra_state(self):
        return {"name": "noted", "mean": torch.arange(3.0), "opaque": Opaque(torch.ones(2))}

    def set_extra_state(self, state):
        pass


def rich_module(**overrides):
    module = toy_module(**overrides)
    module.net[4].weight = module.net[2].weight
    module.net.insert(2, Noted())
    module.register_buffer("scale", torch.linspace(0, 1, 5, dtype=torch.float64))
    return module


def collecting(trainer, path, *arguments):
    """Save in the way in which hooks see values."""
    module = trainer.lightning_module
    module.on_save_checkpoint = lambda checkpoint: None
    trainer.save_checkpoint(path, *arguments)
    del module.on_save_checkpoint


class Counter:
    """Counts states that are collected as a whole."""

    def __init__(self):
        self.number, self._collect = 0, full_state_dict.collect
        full_state_dict.collect = self

    def __call__(self, state):
        self.number += 1
        return self._collect(state)


class SavingBoth(callbacks.Callback):
    """In the midst of an accumulation window, and after an epoch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.save(trainer, "window")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch")
        self.save(trainer, "weights", True)

    def save(self, trainer, name, *arguments):
        counter = Counter()
        trainer.save_checkpoint(self.folder / f"{name}-streamed.ckpt", *arguments)
        assert not counter.number
        collecting(trainer, self.folder / f"{name}-collected.ckpt", *arguments)
        assert counter.number or not trainer.strategy.engine.is_spread


def save_both(folder, smp):
    trainer = toy_trainer(
        folder,
        smp=smp,
        max_epochs=1,
        callbacks=[SavingBoth(folder)],
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )
    trainer.fit(rich_module(), toy_loader(shuffle=False))


def records(path):
    """Content of the archive, without the number that is made of checksums."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    verify_full(path)
    del found[".data/serialization_id"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_file_is_that_of_a_save_that_collects_all(tmp_path, layout):
    ranks, smp = LAYOUTS[layout]
    on_ranks(save_both, ranks, tmp_path, smp)
    for name in ("window", "epoch", "weights"):
        streamed, collected = (records(tmp_path / f"{name}-{way}.ckpt") for way in ("streamed", "collected"))
        assert list(streamed) == list(collected)
        for record, content in collected.items():
            assert streamed[record] == content, record
    content = torch.load(tmp_path / "epoch-streamed.ckpt", weights_only=False)
    state = content["state_dict"]
    assert state["net.5.weight"].data_ptr() == state["net.3.weight"].data_ptr()
    assert state["net.2._extra_state"]["opaque"].tensor.tolist() == [1, 1]
    assert state._metadata[""] == {"version": 1}
    assert "gradients" in torch.load(tmp_path / "window-streamed.ckpt", weights_only=False)


def total_of(checkpoint):
    return sum(float(value.double().sum()) for value in checkpoint["state_dict"].values())


def momentum_of(state):
    return sum(float(kept["exp_avg"].double().abs().sum()) for kept in state["state"].values())


class Asking(callbacks.Callback):
    """Asks the strategy in the midst of a save."""

    def state_dict(self):
        strategy = self.trainer.strategy
        [optimizer] = strategy.optimizers
        weights, state = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer)
        if not strategy.is_global_zero:  # there is no value there
            return {}
        return {"weights": total_of({"state_dict": weights}), "momentum": momentum_of(state)}

    def on_train_epoch_end(self, trainer, pl_module):
        self.trainer = trainer
        counter = Counter()
        trainer.save_checkpoint(trainer.default_root_dir + "/asked.ckpt")
        assert counter.number == 2  # for this callback


def fit_asking(folder):
    trainer = toy_trainer(str(folder), smp=PP2, max_epochs=1, callbacks=[Asking()])
    trainer.fit(toy_module(), toy_loader(shuffle=False))


def test_who_asks_the_strategy_for_values_gets_them(tmp_path):
    on_ranks(fit_asking, 2, tmp_path)
    found = torch.load(tmp_path / "asked.ckpt", weights_only=True)
    [state] = found["optimizer_states"]
    assert found["callbacks"]["Asking"] == {"weights": total_of(found), "momentum": momentum_of(state)}
    assert momentum_of(state) > 0


class Looking(import_module(f"{NEWER}.plugins.precision").Precision):
    def on_save_checkpoint(self, checkpoint):
        if torch.distributed.get_rank() == 0:
            checkpoint["seen"] = total_of(checkpoint)


class Reading(import_module(NEWER).Trainer):
    def save_checkpoint(self, filepath, *arguments, **options):
        checkpoint = self._checkpoint_connector.dump_checkpoint()
        if self.is_global_zero:
            checkpoint["seen"] = total_of(checkpoint)
        self.strategy.save_checkpoint(checkpoint, filepath)


class ReadingStrategy(make_strategy(NEWER)):
    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        if self.is_global_zero:
            checkpoint["seen"] = total_of(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class Saving(callbacks.Callback):
    def __init__(self, save):
        self.on_train_epoch_end = lambda trainer, module: save(trainer)


def fit_looking(folder, who):
    options = {"plugins": [Looking()]} if who == "plugin" else {}
    if who == "strategy":
        options["strategy"] = ReadingStrategy(**PP2)
    saving = Saving(lambda trainer: trainer.save_checkpoint(folder / "x.ckpt"))
    trainer = toy_trainer(folder, smp=PP2, max_epochs=1, callbacks=[saving], **options)
    if who == "trainer":
        trainer.__class__ = Reading
    trainer.fit(toy_module(), toy_loader(shuffle=False))


@pytest.mark.parametrize("who", ["plugin", "trainer", "strategy"])
def test_code_of_the_user_that_gets_the_dict_sees_values(tmp_path, who):
    on_ranks(fit_looking, 2, tmp_path, who)
    found = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert found["seen"] == total_of(found)


# After a run, memory, errors


def save_after_a_run(folder):
    """The module stays spread, so it is saved as in the run."""
    kept = callbacks.ModelCheckpoint(dirpath=folder, filename="best", save_weights_only=True)
    options = {"max_epochs": 1, "callbacks": [kept], "enable_checkpointing": True}
    trainer = toy_trainer(folder, smp={**PP2, "restore_module": "none"}, **options)
    counter = Counter()
    trainer.fit(toy_module(), toy_loader(shuffle=False))
    trainer.save_checkpoint(folder / "end.ckpt")
    return counter.number


def test_a_module_that_stays_spread_is_saved_after_the_run_as_well(tmp_path):
    assert on_ranks(save_after_a_run, 2, tmp_path) == [0, 0]
    best, end = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("best", "end"))
    torch.testing.assert_close(end["state_dict"], best["state_dict"], rtol=0, atol=0)
    assert len(end["optimizer_states"][0]["state"]) == 8
    assert "optimizer_states" not in best


WIDTH, LAYERS = 1024, 8
ONE = WIDTH * WIDTH * 4  # bytes of a matrix


class Large(import_module(NEWER).LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def growth(save):
    """Growth of the resident set at its peak while ``save`` runs."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = peak_bytes()
    save()
    return peak_bytes() - before


def grown(folder, smp, deterministic):
    found = []

    def save(trainer):
        for way in (streaming, collecting):
            found.append(growth(lambda way=way: way(trainer, folder / "x.ckpt")))

    options = {"deterministic": deterministic, "limit_train_batches": 1, "max_epochs": 1}
    trainer = toy_trainer(folder, smp=smp, callbacks=[Saving(save)], use_distributed_sampler=False, **options)
    trainer.fit(Large(), toy_loader(dataset=TensorDataset(torch.ones(8, WIDTH))))
    return found


def streaming(trainer, path):
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_no_rank_ever_has_more_than_one_tensor_of_others(tmp_path, layout):
    """With weights and two moments, a whole checkpoint has three tensors per matrix."""
    found = on_ranks(grown, 2, tmp_path, LAYOUTS[layout][1], True)
    for streamed, _ in found:
        assert streamed < 3 * ONE
    assert found[0][1] > 0.5 * 3 * LAYERS * ONE  # rank 0 has collected them
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]["net.0.weight"].shape == (WIDTH, WIDTH)


def save_twice(folder):
    """The second time, the disk is full after some tensors."""
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 0.5, 0.2
    path, found = folder / "x.ckpt", []

    def save(trainer):
        trainer.save_checkpoint(path)
        before, put, left = path.read_bytes(), _LaidOutFile.fill, [5]

        def broken(self, unfilled, value):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            put(self, unfilled, value)

        _LaidOutFile.fill = broken
        begin = time.monotonic()
        try:
            trainer.save_checkpoint(path)
        except SMPError as error:
            found.extend((time.monotonic() - begin, f"{type(error).__name__}: {error}", path.read_bytes() == before))

    trainer = toy_trainer(folder, smp=PP2, max_epochs=1, callbacks=[Saving(save)])
    trainer.fit(toy_module(), toy_loader(shuffle=False))
    return found


def test_all_ranks_are_told_of_a_full_disk_and_the_old_file_stays(tmp_path):
    first, second = on_ranks(save_twice, 2, tmp_path)
    for seconds, _, is_there in (first, second):
        assert seconds < 10
        assert is_there
    assert first[1].startswith(f"CheckpointError: {tmp_path / 'x.ckpt'} was not saved: the disk is full")
    assert f"PeerFailedError: Rank 0 failed while saving {tmp_path / 'x.ckpt'}: " in second[1]
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
