"""One ordinary checkpoint file, whatever the layout that wrote it or reads it."""

from functools import partial
from importlib import import_module

import pytest
import torch
from lightning_toy import NEWER, error_of, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer


def train(folder, smp, epochs, resume=None):
    module = toy_module()
    keep = import_module(f"{NEWER}.callbacks").ModelCheckpoint(dirpath=folder, filename=f"{epochs}", save_top_k=-1)
    trainer = toy_trainer(folder, smp=smp, max_epochs=epochs, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False), ckpt_path=resume)
    tested = trainer.test(module, toy_loader(shuffle=False), ckpt_path="best", verbose=False)
    held = sum(parameter.untyped_storage().nbytes() for parameter in module.parameters() if parameter.untyped_storage())
    return metrics_of(trainer), tested, held


def smp(degree):
    return {"pipeline_parallel_degree": degree, "microbatches": 4}


@pytest.fixture
def whole_run(tmp_path):
    """Four epochs in one process."""
    with quiet():
        metrics, tested, _ = train(tmp_path / "one", None, 4)
    return metrics, tested, torch.load(tmp_path / "one" / "4.ckpt", weights_only=True)


@pytest.mark.dear
@pytest.mark.parametrize(("writes", "reads"), [(2, 2), (2, 3), (3, 1), (2, None)])
def test_a_run_resumes_under_another_degree(writes, reads, tmp_path, whole_run):
    folder, more = tmp_path / "two", tmp_path / "more"
    on_ranks(train, writes, folder, smp(writes), 2)
    if reads is None:  # plain Lightning
        with quiet():
            results = [train(more, None, 4, folder / "2.ckpt")]
    else:
        results = on_ranks(train, reads, more, smp(reads), 4, folder / "2.ckpt")
    metrics, tested, expected = whole_run
    for found in results:
        assert found[0] == pytest.approx(metrics, rel=1e-4)
        assert found[1][0] == pytest.approx(tested[0], rel=1e-4)
    found = torch.load(more / "4.ckpt", weights_only=True)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-3, atol=1e-5)
    assert found["global_step"] == expected["global_step"]
    assert found["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    states = found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"]
    assert states[0].keys() == states[1].keys()
    for index in states[1]:
        torch.testing.assert_close(states[0][index], states[1][index], rtol=1e-3, atol=1e-5)


def test_the_file_loads_into_the_bare_module(tmp_path):
    on_ranks(train, 2, tmp_path, smp(2), 1)
    content = torch.load(tmp_path / "1.ckpt", weights_only=True)
    module = toy_module(seed=5)
    module.load_state_dict(content["state_dict"])
    assert not any(parameter.isnan().any() for parameter in module.parameters())


def test_each_rank_holds_its_share_only(tmp_path):
    whole = sum(parameter.nbytes for parameter in toy_module().parameters())
    options = {**smp(3), "restore_module": "none"}
    shares = [held for _, _, held in on_ranks(train, 3, tmp_path, options, 1)]
    assert max(shares) < 0.6 * whole  # three linear layers of unequal size
    assert sum(shares) < whole + 200  # one element for each parameter that lives elsewhere


def saved_below_a_device(folder, form):
    trainer = toy_trainer(folder, smp={**smp(2), "state_dict_type": form}, max_steps=1)
    trainer.fit(toy_module(), toy_loader())
    save = partial(trainer.save_checkpoint, "/dev/null/x/y.ckpt")
    return [error_of(save), error_of(partial(save, weights_only=True))]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_checkpoint_below_a_device_is_refused_on_all_ranks(form, tmp_path):
    told = "/dev/null is a device, but a folder is to be written. Name another one."
    for errors in on_ranks(saved_below_a_device, 2, tmp_path, form):
        for error in errors:
            assert told in error
    assert list(tmp_path.iterdir()) == []
