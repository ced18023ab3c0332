"""Sharded checkpoints at addresses: kept, found and resumed as in folders, by several ranks, and whole after a kill."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_toy import on_ranks, toy_loader, toy_module, toy_trainer

from smp_strategy.checkpoint.storage import remote_commit
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.remote_path import any_path
from smp_strategy.checkpoint.storage.verify import problems_of

SHARDED = {"state_dict_type": "sharded"}
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2, **SHARDED}
SDP2 = {"sharded_data_parallel_degree": 2, **SHARDED}
LOSSES = (0.5, 0.3, 0.4, 0.2, 0.1)  # of epochs
REGION = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3():
    """Address of a bucket that a server on this machine has."""
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**REGION, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        try:
            make_bucket(f"{url}/bucket")
            yield "s3://bucket"
        finally:
            server.kill()
            server.wait()


def make_bucket(url):
    until = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture(params=["files", "s3"])
def base(request, tmp_path):
    """An address that all processes of this machine see."""
    if request.param == "files":
        return f"local://{tmp_path}/base"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def validate(self, batch, batch_idx):
    self.log("val_loss", torch.tensor(LOSSES[self.current_epoch]))


def fit(address, smp, *, epochs=4, resume=None, **options):
    kept = ModelCheckpoint(dirpath=address, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    trainer = toy_trainer(None, smp=smp, max_epochs=epochs, callbacks=[kept], enable_checkpointing=True, **options)
    module = toy_module(validation_step=validate)
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False, batch_size=16), ckpt_path=resume)
    return trainer


def keep(address, smp):
    trainer = fit(address, smp)
    loader = toy_loader(shuffle=False)
    tested = [trainer.test(dataloaders=loader, ckpt_path=path, verbose=False) for path in ("best", "last")]
    return os.path.basename(trainer.checkpoint_callback.best_model_path), tested


def weights(address, smp, **options):
    """At the end of a run."""
    trained = fit(address, smp, **options).lightning_module
    return {name: value.detach().clone() for name, value in trained.state_dict().items()}


def go_on(address, smp, epochs):
    return weights(address, smp, epochs=epochs, resume="last")


def names(address):
    """Checkpoints at an address or in a folder."""
    return sorted(each.name for each in any_path(address).iterdir() if each.suffix == ".ckpt")


def saves(address):
    """Folders of saves at an address."""
    return {each.parent for each in (any_path(address) / remote_commit.FOLDER).rglob("*")}


def equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.daily
@pytest.mark.parametrize("later", [False, True])
def test_an_address_has_the_checkpoints_that_a_folder_has(base, later, tmp_path):
    smp = {**PP2, "async_save": later}
    assert on_ranks(keep, 2, base, smp) == on_ranks(keep, 2, f"{tmp_path}/folder", smp)
    assert names(base) == names(f"{tmp_path}/folder") == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert len(saves(base)) == 3
    for name in names(base):
        assert not problems_of(f"{base}/{name}")
    # Another layout goes on from both.
    equal(on_ranks(go_on, 2, base, SDP2, 5)[0], on_ranks(go_on, 2, f"{tmp_path}/folder", SDP2, 5)[0])


def killed(address, smp, number):
    """A run whose first rank is killed before its commit ``number``."""
    commit, commits = remote_commit.commit, iter(range(number + 1))

    def counted(*args):
        if next(commits) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(*args)

    remote_commit.commit = counted
    fit(address, smp)


@pytest.mark.daily
def test_a_kill_before_the_commit_leaves_the_old_checkpoint_whole(base, tmp_path):
    whole = on_ranks(weights, 2, f"{tmp_path}/folder", PP2)[0]
    with pytest.raises(RuntimeError):
        on_ranks(killed, 2, base, PP2, 3)  # that of last.ckpt after the second epoch
    assert names(base) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert not problems_of(f"{base}/last.ckpt")
    assert CheckpointReader.open(f"{base}/last.ckpt").note["epoch"] == 0
    assert len(saves(base)) == 4
    equal(on_ranks(go_on, 2, base, PP2, 4)[0], whole)
    assert len(saves(base)) == len(names(base))
