"""Checkpoints of Accelerate: those of one process, whatever layout writes or reads them."""

import pytest
import torch
from accelerate_checks import (
    MICROBATCHES,
    accelerated_loop,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    on_ranks,
    whole_state,
)
from torch import nn

PP2 = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
LAYOUTS = {
    "pp2": (2, PP2),
    "pp4": (4, {**PP2, "pipeline_parallel_degree": 4}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2, "microbatches": 2}),
    "tp2": (2, {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "microbatches": MICROBATCHES}),
    "pp2 with replicas": (4, {**PP2, "microbatches": 2}),
    "one process": (1, {"pipeline_parallel_degree": 1, "microbatches": MICROBATCHES}),
}
# Whose sums are those of one process.
EXACT = ("pp2", "pp4", "one process")


class Tied(nn.Module):
    """Dropout, tied weights, and a loss inside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(16)) for _ in range(4)
        )
        self.outlet = nn.Linear(16, 8)
        self.again = nn.Linear(8, 16, bias=False)
        self.again.weight = self.inlet.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, inputs, targets):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.outlet(hidden + self.again(inputs)) * self.scale
        return {"loss": nn.functional.cross_entropy(logits, targets)}


def tied(seed=0, **options):
    torch.manual_seed(seed)
    return Tied(**options)


def start(smp, *, seed=0, dropout=0.0, **options):
    """A prepared run, with a scheduler."""
    accelerator = fresh_accelerator(smp, **options)
    model = tied(seed, dropout=dropout)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def go_on(run, data):
    accelerator, model, optimizer, scheduler = run
    if not hasattr(accelerator, "smp"):
        for batch in data:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}
    accelerated_loop(accelerator, model, optimizer, data, scheduler=scheduler)
    return whole_state(accelerator)


def saves(smp, folder, dropout, steps):
    """Train three steps, save, and go on; what there is at the end on rank 0."""
    run = start(smp, dropout=dropout)
    go_on(run, batches()[:3])
    run[0].save_state(folder)
    return go_on(run, batches()[3:steps])


def resumes(smp, folder, dropout, steps, late):
    """Load, before or after the first step, and go on."""
    run = start(smp, seed=5, dropout=dropout)
    if late:
        go_on(run, batches()[:2])
    run[0].load_state(folder)
    return go_on(run, batches()[3:steps])


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the first step"])
@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2", "pp2 with replicas"])
def test_a_run_goes_on_bit_for_bit(layout, late, tmp_path):
    world_size, smp = LAYOUTS[layout]
    expected = on_ranks(saves, world_size, smp, tmp_path / "state", 0.2, 6)[0]
    found = on_ranks(resumes, world_size, smp, tmp_path / "state", 0.2, 6, late)[0]
    assert_same(found, expected)


@pytest.mark.parametrize("reads", ["pp4", "one process", "sdp2", "tp2"])
def test_a_run_goes_on_under_another_layout(reads, tmp_path):
    dropout = 0.2 if reads in EXACT else 0.0
    expected = on_ranks(saves, 2, PP2, tmp_path / "state", dropout, 6)[0]
    world_size, smp = LAYOUTS[reads]
    found = on_ranks(resumes, world_size, smp, tmp_path / "state", dropout, 6, False)[0]
    assert_same(found, expected, **({} if reads in EXACT else {"rtol": 1e-5, "atol": 1e-6}))
