"""What a program computes from its batch can be computed for another microbatch."""

import pytest
import torch
import torch.nn.functional as F

from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord, OutOfSightError

LABELS = torch.tensor([[1, 2, 0], [0, 0, 3], [1, 0, 0], [0, 0, 0]])


def microbatches(size=2):
    batch = {"labels": LABELS.clone(), "name": "x", "lists": ([1], 2.0)}
    return [{**batch, "labels": batch["labels"][start : start + size].data} for start in range(0, 4, size)]


def recorded(function):
    """Result of ``function`` for the first microbatch, and what is known of it."""
    record = BatchRecord(microbatches(), (2, 2))
    with record:
        result = function(record._given[0][("labels",)])
    return record, result, record.find(result)


def shift_in_place(labels):
    labels[labels == 0] = -100
    view = labels[:, 1:]
    view += 1
    return labels


@pytest.mark.parametrize(
    "function",
    [
        lambda labels: F.pad(labels, (0, 1), value=-1)[..., 1:].contiguous().view(-1),
        lambda labels: torch.where(labels > 0, labels, torch.tensor(-100)),
        lambda labels: torch.stack([labels, labels.clone()]).float() / 2,
        lambda labels: labels.T.split(2)[0],
        shift_in_place,
    ],
)
def test_a_value_is_that_of_the_same_operations_on_another_microbatch(function):
    record, result, found = recorded(function)
    assert found is not None
    for number in range(2):
        expected = function(microbatches()[number]["labels"])
        assert torch.equal(record.value(found, number), expected)
    assert torch.equal(result, function(microbatches()[0]["labels"]))


@pytest.mark.parametrize(
    "function",
    [
        lambda labels: labels.float() * torch.rand(3),
        lambda labels: torch.tensor(labels.tolist()) + 1,
        lambda labels: labels.float().bernoulli_(0.5),
    ],
)
def test_what_is_drawn_or_made_out_of_sight_is_not_repeated(function):
    record, _, found = recorded(function)
    assert found is not None
    with pytest.raises(OutOfSightError):
        record.value(found, 1)


@pytest.mark.parametrize(
    ("function", "degree"),
    [
        (lambda labels: (labels > 0).sum(), 1),
        (lambda labels: (labels > 0).float().mean(), 0),
        (lambda labels: 1 / (labels > 0).sum(), -1),
        (lambda labels: (labels > 0).sum().clamp(min=1) * 4 + 1e-6, 1),
        (lambda labels: labels / labels.sum(), -1),
        (lambda labels: labels.float().sum(1).mean(), 0),
    ],
)
def test_sums_over_the_samples_grow_with_the_batch(function, degree):
    _, _, found = recorded(function)
    assert found is not None
    assert (found.facts.degree, found.facts.reduces, found.is_known) == (degree, True, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda labels: labels[0].sum(),
        lambda labels: next(iter(labels)).sum(),
        lambda labels: labels[:1, 1:].sum(),
        lambda labels: labels.unbind()[1].sum(),
        lambda labels: labels.T[:, 0].sum(),
        lambda labels: labels.sum(0),
    ],
)
def test_a_part_of_the_samples_says_nothing_of_the_batch(function):
    _, _, found = recorded(function)
    assert found is not None
    assert not found.is_known


@pytest.mark.parametrize(
    "function",
    [lambda labels: labels[:, 1:].sum(), lambda labels: labels.T[0].sum(), lambda labels: labels[None, ..., 0].sum()],
)
def test_a_part_of_each_sample_does(function):
    _, _, found = recorded(function)
    assert found is not None
    assert found.is_known


def test_sums_of_the_batch_take_the_place_of_those_of_a_microbatch():
    record, _, found = recorded(lambda labels: (labels > 0) / (labels > 0).sum().clamp(min=1))
    assert found is not None
    totals = record.totals(found)
    assert [total.item() for total in totals.values()] == [4]
    assert torch.equal(record.value(found, 1, totals), (LABELS[2:] > 0) / 4)


def test_a_sample_of_a_list_is_not_the_batch():
    samples = [[torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.ones(2)]]
    record = BatchRecord([{"boxes": each} for each in samples], (2, 2))
    with record:
        count = samples[0][0].sum()
    found = record.find(count)
    assert found is not None
    assert not found.is_known


def test_objects_that_hold_each_other_and_samples_of_any_number_do_no_harm():
    class Holder:
        def __init__(self, tensors):
            self.own, self.tensors, self.sizes = self, tensors, [1] * 1000

    record = BatchRecord([Holder([torch.ones(3)] * 3), Holder([torch.ones(3)])], (3, 1))
    with record:
        made = torch.zeros(torch.ones(2, 3).shape).index_fill(0, torch.tensor([0]), 1.0)
        mapped = torch.func.vmap(lambda row: row * 2)(made)
    assert mapped.shape == (2, 3)
