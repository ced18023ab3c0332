"""Training loops with Accelerate, under any layout: the weights of the plain loop in one process.

All cases of a layout run in the same ranks, one after the other, each with an Accelerator of its own.
"""

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin
from accelerate_checks import (
    BATCH,
    CLASSES,
    FEATURES,
    MICROBATCHES,
    Samples,
    accelerated_loop,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    loss_inside,
    loss_outside,
    on_ranks,
    plain_loop,
    toy,
    whole_state,
)
from torch import nn
from torch.utils.data import DataLoader

LAYOUTS = {
    "one process": (1, {}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "pp4": (4, {"pipeline_parallel_degree": 4, "pipeline": "simple"}),
    "pp2 x dp2": (4, {"pipeline_parallel_degree": 2}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "pp2 x sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2, "tensor_parallel": {"inlet": "column", "outlet": "row"}}),
    "zero1": (2, {"shard_optimizer_state": True}),
}
EXACT = ("one process", "pp2", "pp4")

CASES = {
    "a dict, and a scheduler": {"schedules": True},
    "a tuple, and clipping": {"kind": "tuple", "clip": 0.5},
    "a dataclass, accumulation, and clipping in every step": {"kind": "dataclass", "clip": 0.5, "window": 2},
    "a tensor, and accumulation": {"kind": "tensor", "window": 3},
}


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(smp, *, made=toy, kind="dict", window=1, clip=None, schedules=False, loss_of=loss_inside):
    accelerator = fresh_accelerator(smp, gradient_accumulation_steps=window)
    model = made(kind)
    optimizer = adamw(model)
    scheduler = scheduler_of(optimizer) if schedules else None
    # The order is free; what is no object of PyTorch's comes back as it is.
    scheduler, optimizer, model = accelerator.prepare(scheduler, optimizer, model)
    losses = accelerated_loop(accelerator, model, optimizer, batches(), loss_of=loss_of, clip=clip, scheduler=scheduler)
    return whole_state(accelerator), torch.stack(losses), optimizer.param_groups[0]["lr"]


def trained_plainly(replicas, *, made=toy, kind="dict", window=1, clip=None, schedules=False, loss_of=loss_inside):
    model = made(kind)
    optimizer = adamw(model)
    scheduler = scheduler_of(optimizer) if schedules else None

    def schedule():
        # As Accelerate does: once for the batch of each replica.
        for _ in range(replicas if schedules else 0):
            scheduler.step()

    losses = plain_loop(model, optimizer, batches(), loss_of=loss_of, window=window, clip=clip, schedule=schedule)
    return model.state_dict(), torch.stack(losses), optimizer.param_groups[0]["lr"]


def run_all(smp, cases):
    return {name: train(smp, **case) for name, case in cases.items()}


def check(layout, cases):
    ranks, smp = LAYOUTS[layout]
    used = smp.get("pipeline_parallel_degree", 1) * smp.get("tensor_parallel_degree", 1)
    replicas = ranks // used
    found = on_ranks(run_all, ranks, {**smp, "microbatches": MICROBATCHES // replicas}, cases)
    tolerance = {} if layout in EXACT else {"rtol": 1e-5, "atol": 1e-6}
    for name, case in cases.items():
        weights, losses, lr = trained_plainly(replicas, **case)
        assert_same(found[0][name][0], weights, **tolerance)
        mean = torch.stack([seen[name][1] for seen in found]).mean(dim=0)
        # Outside of the model the mean is taken over the whole batch at once, in one more order of additions.
        torch.testing.assert_close(mean, losses, rtol=1e-5, atol=1e-6, msg=name)
        assert [seen[name][2] for seen in found] == [lr] * ranks, name


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_in_the_model(layout):
    check(layout, CASES)


OUTSIDE = {
    "a dict": {"loss_of": loss_outside},
    "a tuple, accumulation, and clipping": {"loss_of": loss_outside, "kind": "tuple", "window": 2, "clip": 0.5},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_outside_of_the_model(layout):
    check(layout, OUTSIDE)


class Affine(nn.Module):
    """A model that is all parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, FEATURES * CLASSES).view(FEATURES, CLASSES))
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, inputs):
        return inputs @ self.weight + self.bias


def layer(kind):
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


BARE = {
    "a layer": {"made": layer, "loss_of": loss_outside, "window": 2},
    "parameters, and clipping": {"made": lambda kind: Affine(), "loss_of": loss_outside, "clip": 0.5},
}


@pytest.mark.parametrize("layout", ["one process", "sdp2", "zero1"])
def test_a_model_that_cannot_be_cut(layout):
    check(layout, BARE)


def of_the_issue(smp, plugin):
    """The loop as it stands in scripts: prepared loaders, two epochs, a last window that is shorter."""
    accelerator = fresh_accelerator(smp, gradient_accumulation_plugin=GradientAccumulationPlugin(2, **plugin))
    model = toy()
    optimizer = adamw(model)
    loader = DataLoader(Samples(5 * BATCH), batch_size=BATCH // accelerator.num_processes)
    scheduler = scheduler_of(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return whole_state(accelerator), scheduler.get_last_lr()


WINDOWS = {
    "at the end of the loader": {},
    "each batch": {"sync_each_batch": True},
    "across epochs": {"sync_with_dataloader": False},
}


@pytest.mark.dear
@pytest.mark.parametrize("layout", ["pp2", "pp2 x dp2"])
def test_the_loop_of_scripts(layout):
    ranks, smp = LAYOUTS[layout]
    replicas = ranks // 2
    found = on_ranks(of_all_windows, ranks, {**smp, "microbatches": MICROBATCHES // replicas})
    for name, plugin in WINDOWS.items():
        model = toy()
        optimizer = adamw(model)
        scheduler = scheduler_of(optimizer)

        def schedule(scheduler=scheduler):
            for _ in range(replicas):
                scheduler.step()

        data = batches(5)
        passes = [data, data] if plugin.get("sync_with_dataloader", True) else [data + data]
        for each in passes:
            plain_loop(model, optimizer, each, window=2, clip=1.0, schedule=schedule)
        for weights, lr in (rank[name] for rank in found):
            assert lr == scheduler.get_last_lr()
            if weights:
                assert_same(weights, model.state_dict(), **({} if layout == "pp2" else {"rtol": 1e-5, "atol": 1e-6}))


def of_all_windows(smp):
    return {name: of_the_issue(smp, plugin) for name, plugin in WINDOWS.items()}


def predicted_peaks(smp, window):
    accelerator = fresh_accelerator(smp, gradient_accumulation_steps=window)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerated_loop(accelerator, model, optimizer, batches(1))
    stages = accelerator.smp.engine.partition.stages
    return [stage.memory_bytes for stage in stages], [stage.held.gradient for stage in stages]


def test_a_step_that_adds_to_no_gradients_is_predicted_to_make_them_on_the_way():
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    (alone, gradients), _ = on_ranks(predicted_peaks, 2, smp, 1)
    (adding, _), _ = on_ranks(predicted_peaks, 2, smp, 2)
    for less, more, gradient in zip(alone, adding, gradients, strict=True):
        assert more - gradient < less < more
