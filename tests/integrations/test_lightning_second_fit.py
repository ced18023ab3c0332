"""A module that was built without values trains again, and no rank ever holds all of it."""

import contextlib

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, WeightAveraging
from lightning_toy import CLASSES, FEATURES, metrics_of, on_ranks, quiet, toy_data, toy_loader, toy_module, toy_trainer
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from smp_strategy.engine import local_model
from smp_strategy.engine.local_model import LocalModel
from tests.ranks.test_delayed import LivingBytes

WIDTH, MICROBATCHES, BATCH = 64, 2, 8
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
SPLIT = {"tensor_parallel_degree": 2, "tensor_parallel": {"net.*.0": "column"}}
LAYOUTS = {
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "sdp2": (2, SHARDED),
    "tp2": (2, SPLIT),
    "pp2_sdp2": (4, {"pipeline_parallel_degree": 2, **SHARDED}),
}


def configure_model(self):
    if not hasattr(self, "net"):
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(6))
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


class Looks(ModelSummary):
    """Notes the set-up of each fit as user code meets it, and the bytes that are allocated before its first step."""

    def __init__(self):
        super().__init__()
        self.met, self.bytes, self.counter = [], [], None

    def setup(self, trainer, module, stage):
        if stage == "fit":
            self.counter = LivingBytes()
            self.counter.__enter__()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            self.bytes.append(self.counter.most)
            self.counter = None

    def summarize(self, summary_data, total_parameters, trainable_parameters, *args, **options):
        self.met.append((total_parameters, trainable_parameters))


def configure_optimizers(self):
    """Matrices of linear layers decay, as in many programs that look at classes and shapes."""
    layers = [each for each in self.modules() if isinstance(each, nn.Linear)]
    decayed = [each.weight for each in layers]
    others = [each for each in self.parameters() if each.ndim < 2]
    assert sorted(map(id, [*decayed, *others])) == sorted(map(id, self.parameters()))
    self.shapes.append([tuple(each.shape) for each in decayed])
    # Not a tiny eps: Adam would blow the rounding of another order of additions up where gradients are tiny.
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-3)


def read_weights(self):
    """For which a shard group has the whole weights for a moment."""
    reads = self.trainer.reads
    self.norms.append([weight.norm().item() for weight in self.parameters()] if reads else [])


def lives(folder, smp, begin=None, num_accumulated=1):
    """Evaluation, and three fits by two Trainers; without ``smp`` in one process, with the weights ``begin``."""
    module = toy_module(
        configure_model=configure_model, configure_optimizers=configure_optimizers, on_fit_start=read_weights
    )
    del module.net
    module.norms, module.shapes, looks = [], [], Looks()
    if begin is not None:
        configure_model(module)
        module.load_state_dict(begin)

    def trainer():
        options = {"accumulate_grad_batches": num_accumulated, "use_distributed_sampler": False}
        options |= {"callbacks": [looks], "num_sanity_val_steps": 0, "enable_model_summary": True}
        return toy_trainer(folder, smp=smp, max_epochs=1, **options)

    data = toy_loader(shuffle=False, batch_size=BATCH // num_accumulated, dataset=toy_data(2 * BATCH))
    results = []
    with restores() as restored:
        for current, fits in ((trainer(), 2), (trainer(), 1)):
            current.reads = fits == 1
            current.validate(module, data, verbose=False)
            if smp is not None and not results:
                current.save_checkpoint(folder / "begin.ckpt", weights_only=True)
            for epochs in range(1, fits + 1):
                current.fit_loop.max_epochs = epochs
                current.fit(module, data, data)
                results.append((metrics_of(current), module.norms[-1], module.shapes[-1], looks.met[-1:]))
    current.save_checkpoint(folder / "end.ckpt", weights_only=True)
    return results, looks.bytes, restored


def weights_of(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state_dict"]


@contextlib.contextmanager
def restores():
    """Note on which ranks the module is made whole, and do not count the tensors that optimizers are tried with."""
    restore, problems, found = LocalModel.restore, local_model.problems_of_cuts, []

    def noted(self, where):
        found.append(where)
        restore(self, where)

    def uncounted(*args, **options):
        with _disable_current_modes():
            return problems(*args, **options)

    LocalModel.restore, local_model.problems_of_cuts = noted, uncounted
    try:
        yield found
    finally:
        LocalModel.restore, local_model.problems_of_cuts = restore, problems


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fits_and_evaluations_follow_each_other_spread(layout, tmp_path):
    size, options = LAYOUTS[layout]
    smp = {"microbatches": MICROBATCHES, "delayed_parameter_initialization": True, **options}
    ranks = on_ranks(lives, size, tmp_path / "smp", smp)
    with quiet():
        begin, num_accumulated = weights_of(tmp_path / "smp" / "begin.ckpt"), MICROBATCHES if "pp" in layout else 1
        plain, *_ = lives(tmp_path / "one", None, begin, num_accumulated)
    # Kernels round the ends of pieces otherwise than the middle of a whole parameter.
    exact = 0 if layout == "pp2" else 1e-5
    found, wanted = (weights_of(tmp_path / which / "end.ckpt") for which in ("smp", "one"))
    total = sum(each.nbytes for each in wanted.values())
    for results, allocated, restored in ranks:
        assert set(restored) == {"none"}
        assert len(allocated) == 3
        # Before the first of them the evaluation has spread the module.
        # Sizes of split layers are shown in the place of this rank's parts, which are counted then.
        assert max(allocated[:2]) < (0.65 if layout == "tp2" else 0.25) * total
        for (metrics, norms, shapes, counts), expected in zip(results, plain, strict=True):
            for name in ("train_loss_epoch", "val_loss"):
                assert metrics[name] == pytest.approx(expected[0][name], rel=1e-5)
            assert norms == pytest.approx(expected[1], rel=1e-6)
            assert shapes == expected[2]
            assert counts in (expected[3], [])  # the first rank shows them
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=exact, atol=exact)


DELAYED = {"delayed_parameter_initialization": True}
PP2 = {**DELAYED, "pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
CHANGES = {
    "pp2 to sdp2": (PP2, {**DELAYED, **SHARDED}),
    "sdp2 to pp2": ({**DELAYED, **SHARDED}, {**PP2, "microbatches": 4}),
    "pp2 to tp2": (PP2, {**DELAYED, **SPLIT}),
}


def two_fits(folder, options, begin=None):
    """A fit for each of ``options``; with the weights ``begin``, in one process that accumulates microbatches."""
    module = toy_module(configure_model=configure_model, configure_optimizers=configure_optimizers)
    del module.net
    module.shapes = []
    if begin is not None:
        configure_model(module)
        module.load_state_dict(begin)
    with restores() as restored:
        for number, smp in enumerate(options):
            accumulated = smp.get("microbatches", 1) if begin is not None else 1
            fit = {"accumulate_grad_batches": accumulated, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
            trainer = toy_trainer(folder, smp=smp if begin is None else None, max_epochs=1, **fit)
            data = toy_loader(shuffle=False, batch_size=BATCH // accumulated, dataset=toy_data(2 * BATCH))
            if begin is None and not number:
                trainer.validate(module, data, verbose=False)
                trainer.save_checkpoint(folder / "begin.ckpt", weights_only=True)
            trainer.fit(module, data)
    trainer.save_checkpoint(folder / "end.ckpt", weights_only=True)
    return restored


@pytest.mark.parametrize("change", CHANGES)
def test_a_fit_with_other_options_puts_the_module_together_and_goes_on(change, tmp_path):
    for restored in on_ranks(two_fits, 2, tmp_path / "smp", CHANGES[change]):
        assert restored == ["none", "none", "all", "none"]
    with quiet():
        two_fits(tmp_path / "one", CHANGES[change], weights_of(tmp_path / "smp" / "begin.ckpt"))
    found, expected = (weights_of(tmp_path / which / "end.ckpt") for which in ("smp", "one"))
    exact = 1e-5 if "tp2" in change else 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=exact, atol=exact)


def average(folder, smp):
    """Two fits with a callback that copies the module when training is set up."""
    module = toy_module(configure_model=configure_model)
    del module.net
    data = toy_loader(shuffle=False, batch_size=BATCH, dataset=toy_data(2 * BATCH))
    for _ in range(2):
        trainer = toy_trainer(folder, smp=smp, max_epochs=1, callbacks=[WeightAveraging()])
        trainer.fit(module, data)
    trainer.save_checkpoint(folder / "end.ckpt", weights_only=True)


def test_a_callback_that_copies_the_module_gets_a_whole_one(tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2, "delayed_parameter_initialization": True}
    on_ranks(average, 2, tmp_path / "whole", {**smp, "restore_module": "all"})
    on_ranks(average, 2, tmp_path / "spread", smp)
    found, expected = (weights_of(tmp_path / which / "end.ckpt") for which in ("spread", "whole"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class OnPurposeError(Exception):
    pass


def fail_and_fit(folder, smp):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and not self.has_failed:  # not in its dry run
            self.has_failed = True
            raise OnPurposeError
        return self.loss(batch)

    module = toy_module(configure_model=configure_model, training_step=training_step, has_failed=False)
    del module.net
    data = toy_loader(shuffle=False, batch_size=BATCH, dataset=toy_data(2 * BATCH))
    toy_trainer(folder, smp=smp).validate(module, data, verbose=False)
    with pytest.raises(OnPurposeError):
        toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False).fit(module, data)
    with restores() as restored:
        trainer = toy_trainer(folder, smp=smp, max_epochs=1)
        trainer.fit(module, data)
    trainer.save_checkpoint(folder / "end.ckpt", weights_only=True)
    return restored


def test_after_a_failure_the_module_is_put_together_first(tmp_path):
    smp = {"microbatches": 2, "delayed_parameter_initialization": True, **SHARDED}
    for restored in on_ranks(fail_and_fit, 2, tmp_path, smp):
        assert restored[0] == "all"
    assert all(value.isfinite().all() for value in weights_of(tmp_path / "end.ckpt").values())
