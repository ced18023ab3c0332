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


def lives(folder, smp, begin=None):
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
        options = {"accumulate_grad_batches": MICROBATCHES} if smp is None else {"use_distributed_sampler": False}
        options |= {"callbacks": [looks], "num_sanity_val_steps": 0, "enable_model_summary": True}
        return toy_trainer(folder, smp=smp, max_epochs=1, **options)

    batch_size = BATCH // MICROBATCHES if smp is None else BATCH
    data = toy_loader(shuffle=False, batch_size=batch_size, dataset=toy_data(2 * BATCH))
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fits_and_evaluations_follow_each_other_spread(layout, tmp_path):
    size, options = LAYOUTS[layout]
    smp = {"microbatches": MICROBATCHES, "delayed_parameter_initialization": True, **options}
    ranks = on_ranks(lives, size, tmp_path / "smp", smp)
    with quiet():
        plain, *_ = lives(tmp_path / "one", None, weights_of(tmp_path / "smp" / "begin.ckpt"))
    exact = 1e-5 if layout == "tp2" else 0
    found, wanted = (weights_of(tmp_path / which / "end.ckpt") for which in ("smp", "one"))
    total = sum(each.nbytes for each in wanted.values())
    for results, allocated, restored in ranks:
        assert set(restored) == {"none"}
        assert len(allocated) == 3
        # Before the first of them the evaluation has spread the module.
        assert max(allocated[:2]) < 0.15 * total
        for (metrics, norms, shapes, counts), expected in zip(results, plain, strict=True):
            for name in ("train_loss_epoch", "val_loss"):
                assert metrics[name] == pytest.approx(expected[0][name], rel=1e-5)
            assert norms == pytest.approx(expected[1], rel=1e-6 + exact)
            assert shapes == expected[2]
            assert counts in (expected[3], [])  # the first rank shows them
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=10 * exact, atol=exact, msg=name)
