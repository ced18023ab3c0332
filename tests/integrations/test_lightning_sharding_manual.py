"""Manual optimization under ``sharded_data_parallel_degree``: GANs, accumulation by hand, graphs that live on."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning_toy import CLASSES, FEATURES, on_ranks, toy_data, toy_module, toy_trainer
from test_lightning_manual import BATCH, CASES, STEPS, Watching, classifier, fit, sgd
from torch import nn
from torch.utils.data import DataLoader, Subset

from smp_strategy.errors import PeerFailedError

ONE = {"pipeline_parallel_degree": 1}
SHARDED = {**ONE, "sharded_data_parallel_degree": 2}
OF_STAGES = {**SHARDED, "pipeline_parallel_degree": 2, "microbatches": 2}
LAYOUTS = {
    "2 shards": (2, 1, SHARDED),
    "2 replicas of 2 shards": (4, 1, SHARDED),
    "2 shards of 2 stages": (4, 2, OF_STAGES),
}


class AllAreSpread(Callback):
    """Weights that the glue uses would not be, and then nothing is tested."""

    def on_train_end(self, trainer, module):
        share = trainer.strategy.engine.local_model.holdings
        assert len(share.sharded.parameters) == len(share.parameters)


def fit_share(folder, name, smp, options):
    """Train on this replica's share of each batch."""

    def train_dataloader(self):
        mesh = self.trainer.strategy.mesh
        mine = [index for index in range(STEPS * BATCH) if index % BATCH // (BATCH // mesh.dp) == mesh.dp_rank]
        return DataLoader(Subset(toy_data(STEPS * BATCH), mine), batch_size=BATCH // mesh.dp)

    options = {"use_distributed_sampler": False, "callbacks": [*options.get("callbacks", ()), AllAreSpread()]}
    return fit(folder, name, smp, options, train_dataloader)


def assert_close(found, expected):
    assert found["global_step"] == expected["global_step"]
    assert found["rates"] == expected["rates"]
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("layout", LAYOUTS)
# Calls parts of a unit: weights that the glue uses are not spread.
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"two losses"}))
def test_the_weights_are_those_of_one_process_over_the_same_microbatches(name, layout, tmp_path):
    ranks, pp, smp = LAYOUTS[layout]
    microbatches = ranks // pp * smp.get("microbatches", 1)
    expected = on_ranks(fit, 1, tmp_path / "one", name, {**ONE, "microbatches": microbatches}, {})[0]
    for found in on_ranks(fit_share, ranks, tmp_path / "smp", name, smp, {}):
        assert_close(found, expected)


@pytest.mark.parametrize("other", [{"sdp_gather": "step"}, {"sdp_param_persistence_threshold": 100}], ids=str)
def test_when_units_are_gathered_does_not_change_the_weights(tmp_path, other):
    expected, found = (
        on_ranks(fit_share, 2, tmp_path / name, "GAN", options, {})[0]
        for name, options in {"use": SHARDED, "other": {**SHARDED, **other}}.items()
    )
    assert_close(found, expected)


def frozen_in_between(self, batch, batch_idx):
    """What the first optimizer has accumulated stays while its parameters are frozen, and others get gradients."""
    first, second = self.optimizers()
    self.manual_backward(self.loss(batch))
    self.toggle_optimizer(second)
    self.manual_backward(self.loss(batch))
    self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    second.step()
    second.zero_grad(set_to_none=False)
    self.untoggle_optimizer(second)
    self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    if batch_idx % 2:
        first.step()
        first.zero_grad()


def alternating(self):
    """Both have parameters of the same units."""
    parameters = list(self.net.parameters())
    return [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in (parameters[::2], parameters[1::2])]


def two_modules(self):
    classifier(self)
    self.first, self.rest = self.net[:2], self.net[2:]
    del self.net


def two_losses_step(self, batch, batch_idx):
    """The second loss shares its first layers with the first one; weights are let go of in between."""
    optimizer = self.optimizers()
    inputs, targets = batch
    hidden = self.first(inputs)
    logits = self.rest(hidden)
    optimizer.zero_grad()
    self.manual_backward(nn.functional.cross_entropy(logits, targets), retain_graph=True)
    self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    self.manual_backward(hidden.pow(2).mean() + logits.logsumexp(1).mean())
    optimizer.step()


CASES_HERE = {
    "two losses": (two_modules, {"training_step": two_losses_step, "configure_optimizers": sgd}),
    "frozen in between": (classifier, {"training_step": frozen_in_between, "configure_optimizers": alternating}),
}


def fit_here(run, folder, name, *args):
    CASES.update(CASES_HERE)  # of this forked rank
    return run(folder, name, *args)


@pytest.mark.parametrize("smp", [SHARDED, OF_STAGES], ids=["2 shards", "2 shards of 2 stages"])
@pytest.mark.parametrize("name", CASES_HERE)
def test_graphs_and_gradients_live_on_between_barriers(name, smp, tmp_path):
    pp, microbatches = smp["pipeline_parallel_degree"], smp.get("microbatches", 1)
    one = {**ONE, "microbatches": 2 * microbatches}
    expected = on_ranks(fit_here, 1, fit, tmp_path / "one", name, one, {})[0]
    assert_close(on_ranks(fit_here, 2 * pp, fit_share, tmp_path / "smp", name, smp, {})[0], expected)


def watch(run, folder, smp):
    callback = Watching()
    found = run(folder, "accumulation", smp, {"callbacks": [callback]})
    # The loss is that of a replica's own samples.
    return [each for each in callback.seen if each[0] != "before backward"], found


@pytest.mark.parametrize("smp", [SHARDED, OF_STAGES], ids=["2 shards", "2 shards of 2 stages"])
def test_hooks_between_backward_and_the_step_see_whole_gradients(smp, tmp_path):
    pp, microbatches = smp["pipeline_parallel_degree"], smp.get("microbatches", 1)
    [(expected, of_one)] = on_ranks(watch, 1, fit, tmp_path / "one", {**ONE, "microbatches": 2 * microbatches})
    assert ("after backward", True) in expected
    for seen, found in on_ranks(watch, 2 * pp, fit_share, tmp_path / "smp", smp):
        assert seen == [(name, *(pytest.approx(value, abs=2e-4) for value in values)) for name, *values in expected]
        assert_close(found, of_one)


class Outside(nn.Module):
    """Gives its weight away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 16))

    def forward(self):
        return self.weight


def two_units(self):
    self.automatic_optimization = False
    self.net, self.out = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16)), Outside()


def gives_weights_away(self, batch, batch_idx):
    inputs, targets = batch
    logits = nn.functional.linear(self.net(inputs), self.out())
    self.manual_backward(nn.functional.cross_entropy(logits, targets))
    self.optimizers().step()


def through_changed_weights(self, batch, batch_idx):
    loss = self.loss(batch)
    self.manual_backward(loss, retain_graph=True)
    self.optimizers().step()
    self.manual_backward(loss)


def twice(self, batch, batch_idx):
    loss = self.loss(batch)
    self.manual_backward(loss)
    self.manual_backward(loss)


def steps_on_one_rank(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    if self.trainer.strategy.mesh.dp_rank == 0:
        self.optimizers().zero_grad()
    self.optimizers().step()


def another_pass_on_one_rank(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    if self.trainer.strategy.mesh.dp_rank == 0:
        self.manual_backward(self.loss(batch))
    self.optimizers().step()


REFUSED = {
    gives_weights_away: "`out` returns one of its weights, or a view of one",
    through_changed_weights: "modified by an inplace operation",
    twice: "backward through the graph a second time",
    steps_on_one_rank: "This rank is at `step` of optimizer 0, and other ranks of its shard group",
    another_pass_on_one_rank: "This rank is at `(step|manual_backward).*, and other ranks of its shard group",
}


def refusal(folder, step, smp):
    module = toy_module(training_step=step, configure_optimizers=sgd)
    (two_units if step is gives_weights_away else classifier)(module)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1)
    try:
        trainer.fit(module, DataLoader(toy_data(BATCH), batch_size=4))
    except PeerFailedError:
        return ""
    except RuntimeError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("smp", [SHARDED, {**SHARDED, "sdp_gather": "step"}, OF_STAGES], ids=["use", "step", "stages"])
@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_freed_or_changed_weights_are_not_read_and_other_paths_are_refused(step, smp, tmp_path):
    messages = {found for found in on_ranks(refusal, 2 * smp["pipeline_parallel_degree"], tmp_path, step, smp) if found}
    assert messages
    for message in messages:
        assert re.search(REFUSED[step], message, re.DOTALL), message
