"""Notes on layers and losses whose numbers depend on how a batch is cut."""

import pytest
from torch import nn

from smp_strategy.engine.microbatch_notes import notes_on_microbatches


def notes(module, sizes=(2, 2, 1), *, averages=True):
    return list(notes_on_microbatches(module, sizes, averages=averages))


def test_batch_statistics_of_microbatches_are_told_with_the_remedy():
    (note,) = notes(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    assert note == (
        "Layers like `1` (BatchNorm1d) and 1 more normalize by the statistics of each microbatch (1 to 2 samples) "
        "instead of the batch's (5 samples), as under gradient accumulation; running statistics move 3 times per step, "
        "each time by `momentum`. For the numbers of the whole batch set `microbatches=1`, or use a norm of each "
        "sample (LayerNorm, GroupNorm)."
    )


def test_nothing_is_told_of_running_statistics_that_are_not_tracked():
    (note,) = notes(nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)))
    assert "running statistics" not in note


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (nn.BatchNorm1d(4), (8,)),
        (nn.BatchNorm1d(4).eval(), (4, 4)),
        (nn.Sequential(nn.LayerNorm(4), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)), (4, 4)),
        (nn.Sequential(nn.Linear(2, 2), nn.MSELoss()), (4, 4)),
    ],
    ids=["one microbatch", "frozen", "norms of samples", "a mean"],
)
def test_what_does_not_depend_on_microbatches_is_not_mentioned(module, sizes):
    assert notes(module, sizes) == []


def test_a_loss_that_is_a_sum_is_told_unless_losses_are_added_up():
    module = nn.ModuleDict({"net": nn.Linear(2, 2), "criterion": nn.CrossEntropyLoss(reduction="sum")})
    (note,) = notes(module, (4, 4))
    assert note.startswith(
        "Layers like `criterion` (CrossEntropyLoss) add up the losses of samples (`reduction='sum'`)"
    )
    assert "about 1/2 of it. Use `reduction='mean'`, or set `microbatches=1`." in note
    assert notes(module, (4, 4), averages=False) == []
