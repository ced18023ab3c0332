"""Merging what the microbatches of one step have logged."""

import pytest
import torch

from smp_strategy.integrations.lightning.logging import LoggedCall, LogRecorder, merge_calls


def notes(*pairs, **options):
    return [LoggedCall(name=name, options=options) for name, _ in pairs], [value for _, value in pairs]


def merged(microbatches, sizes):
    return [(call.name, value) for call, value in merge_calls(microbatches, sizes)]


def test_a_mean_is_weighted_by_samples():
    [(name, value)] = merged([notes(("loss", torch.tensor(1.0))), notes(("loss", torch.tensor(4.0)))], [2, 1])
    assert (name, value.item()) == ("loss", 2.0)


@pytest.mark.parametrize(("reduce_fx", "expected"), [("sum", 5), ("min", 1), ("max", 4), (torch.sum, 5), (max, 4)])
def test_the_reduction_that_the_user_names_is_used(reduce_fx, expected):
    microbatches = [notes(("n", torch.tensor(value)), reduce_fx=reduce_fx) for value in (1, 4)]
    [(_, value)] = merged(microbatches, [2, 1])
    assert value == expected


def test_the_same_number_everywhere_is_not_rounded():
    assert merged([notes(("lr", 0.1))] * 3, [3, 3, 1]) == [("lr", 0.1)]


def test_an_object_that_is_no_number_is_passed_on_once():
    metric = object()
    assert merged([notes(("acc", metric))] * 2, [1, 1]) == [("acc", metric)]


def test_repeated_keys_are_paired_by_occurrence():
    microbatches = [notes(("x", 1.0), ("x", 10.0)), notes(("x", 3.0), ("x", 30.0))]
    assert [value.item() for _, value in merged(microbatches, [1, 1])] == [2.0, 20.0]


def test_a_key_that_only_one_microbatch_logs_survives():
    assert merged([notes(("a", 1.0)), notes(("a", 1.0), ("rare", 7.0))], [1, 1]) == [("a", 1.0), ("rare", 7.0)]


@pytest.mark.parametrize(
    ("given", "logged", "mean"),
    [
        ((2, 1), 3, 2.0),  # counted in the step
        ((3, 3), 3, 2.0),  # a constant of the whole batch
        ((10, 30), 40, 3.25),  # something else than samples, tokens say
    ],
)
def test_batch_size_is_that_of_the_whole_batch(given, logged, mean):
    microbatches = [
        notes(("loss", torch.tensor(value)), batch_size=size) for value, size in zip((1.0, 4.0), given, strict=True)
    ]
    [(call, value)] = merge_calls(microbatches, [2, 1])
    assert (call.options["batch_size"], value.item()) == (logged, mean)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logged = []

    def log(self, name, value, prog_bar=False, **more):
        self.logged.append((name, value, prog_bar, more))


def test_a_recorder_takes_notes_while_it_is_installed():
    module = Module()
    recorder = LogRecorder(module)
    with recorder.installed(), recorder.notes() as noted:
        module.log("loss", torch.tensor(2.0, requires_grad=True), True, on_step=True)
    assert module.logged == []
    recorder.replay([noted], [1])
    module.log("direct", 1.0)
    assert [entry[0] for entry in module.logged] == ["loss", "direct"]
    assert module.logged[0][2:] == (True, {"on_step": True})
    assert not module.logged[0][1].requires_grad


def test_a_value_counts_as_it_was_when_it_was_logged():
    module = Module()
    recorder = LogRecorder(module)
    value = torch.tensor(1.0)
    with recorder.installed(), recorder.notes() as noted:
        module.log("x", value)
        value.add_(1.0)
    recorder.replay([noted], [1])
    assert module.logged[0][1].item() == 1.0
