"""Notes on layers and losses whose numbers depend on how a batch is cut."""

import pytest
import torch
from torch import nn

from smp_strategy.engine.figures.microbatch_notes import (
    note_on_comparison,
    notes_on_buffers,
    notes_on_microbatches,
    notes_on_objects,
    told_of_microbatches,
)
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import flatten_call
from smp_strategy.model.trace.shape_inference import ShapeInference


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


class Graph:
    def __init__(self):
        self.edges = torch.zeros(2, 5)


def test_objects_that_all_microbatches_share_are_told_if_they_hold_tensors():
    graph, settings, x = Graph(), object(), torch.zeros(4)
    (note,) = notes_on_objects(
        [{"x": x[:2], "graph": graph, "is": settings}, {"x": x[2:], "graph": graph, "is": settings}]
    )
    assert note.startswith("`batch['graph']` (Graph) holds tensors, none of them with an entry per sample")
    assert "each of the 2 microbatches gets all of it" in note
    for others in ([x, x], [(x, Graph()), (x, Graph())], [{"graph": graph}]):
        assert list(notes_on_objects(others)) == []


def test_buffers_that_layers_update_are_told_with_the_rule():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    written = {"0.code", "2.code", "1.running_mean"}
    (note,) = notes_on_buffers(model, written, replicas=2, microbatches=4)
    assert note == (
        "Buffers like `0.code` and 1 more are updated by layers in training: a step updates them 4 times, once per "
        "microbatch; each of the 2 replicas updates them by its own samples, and after the step all take over those of "
        "the first, as under DistributedDataParallel. One process that sees the whole batch updates them otherwise."
    )
    (note,) = notes_on_buffers(model, {"0.code"}, replicas=1, microbatches=2)
    assert "replicas" not in note
    assert not list(notes_on_buffers(model, written, replicas=1, microbatches=1))
    assert not list(notes_on_buffers(model, {"1.running_mean"}, replicas=2, microbatches=2))


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.code.mul_(0.9).add_(x.mean(0))
        return x + self.code + self.table


def test_dry_runs_find_the_buffers_that_layers_update():
    found = ShapeInference(torch.device("cpu"))
    unit = Codebook()
    leaves, structure = flatten_call((torch.ones(3, 2),), {})
    found.predict(Callee("unit", unit.forward, unit.eval()), leaves, structure)
    assert not found.written_buffers
    found.predict(Callee("unit", unit.forward, unit.train()), leaves, structure)
    assert found.written_buffers == {"unit.code"}
    assert not unit.code.any()


@pytest.mark.parametrize(
    ("num_stages", "takes_whole", "told"),
    [
        (1, False, "With 2 microbatches it is computed in each microbatch (1 to 2 samples) instead of the batch (3 "),
        (1, False, "`microbatches=1`: then the activations of the whole batch are in memory at once."),
        (
            4,
            False,
            "then stages do not overlap (a step of 4 equal stages takes 1.6 times as long), and the activations",
        ),
        (2, True, "So batches (3 samples) are not cut into microbatches"),
    ],
)
def test_a_comparison_of_samples_is_told_with_its_operation_the_remedy_and_its_price(num_stages, takes_whole, told):
    operation = "`matmul` adds up pairs of samples"
    note = note_on_comparison(operation, (2, 1), num_stages=num_stages, takes_whole=takes_whole)
    assert note.startswith(f"The loss compares samples of its batch: {operation}. ")
    assert told in note
    assert "set `microbatches" in note.lower()


@pytest.mark.parametrize(
    ("error", "sizes", "is_told"),
    [
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (6)"), (2, 2), True),
        (ValueError("Expected input batch_size (4) to match target batch_size (2): shapes differ"), (2, 2), True),
        (IndexError("index 5 is out of bounds for dimension 0 with size 3"), (3, 2), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (6)"), (4,), False),
        (ValueError("a mistake of the user"), (2, 2), False),
        (UnsupportedError("shapes of microbatches"), (2, 2), False),
    ],
)
def test_an_error_about_shapes_says_that_the_step_sees_parts_of_the_batch(error, sizes, is_told):
    with pytest.raises(type(error)) as raised, told_of_microbatches(sizes):
        raise error
    notes = " ".join(getattr(raised.value, "__notes__", ()))
    assert ("`lengths.max()`" in notes and "`microbatches=1`" in notes) == is_told
