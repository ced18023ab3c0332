"""Turns of two microbatches on shared objects, without programs."""

import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from smp_strategy.model.trace.places import MOST_ENTRIES
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.isolation.written_values import MISSING, merged


class Glue(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


def turn(state, microbatch, body):
    state.enter(microbatch)
    body()
    state.leave(microbatch)


def tensors(count):
    return [torch.full((), float(number)) for number in range(count)]


def test_places_of_a_list_belong_to_whoever_fills_them():
    a, b, c = tensors(3)
    glue = Glue(places=[None, None])
    state = MicrobatchState([glue], [])
    state.begin()
    turn(state, 0, lambda: glue.places.__setitem__(0, a))
    turn(state, 1, lambda: glue.places.__setitem__(0, b))
    assert glue.places == [None, None]

    def fill():
        assert glue.places[0] is a
        glue.places[1] = c

    turn(state, 0, fill)
    state.end()
    assert glue.places[0] is b
    assert glue.places[1] is c


def test_items_keep_their_places_among_what_is_shared():
    a, b, c = tensors(3)
    glue = Glue(mixed=[1])
    state = MicrobatchState([glue], [])
    state.begin()
    turn(state, 0, lambda: glue.mixed.extend([a, 2, b]))
    turn(state, 1, lambda: glue.mixed.append(c))
    assert glue.mixed == [1]
    turn(state, 0, lambda: [item is other or 1 / 0 for item, other in zip(glue.mixed, [1, a, 2, b], strict=True)])
    state.end()
    assert [item for item in glue.mixed if isinstance(item, int)] == [1, 2]
    assert [item for item in glue.mixed if isinstance(item, torch.Tensor)] == [a, b, c]


def test_what_holds_no_tensors_is_shared():
    glue = Glue(count=0, names=[])
    state = MicrobatchState([glue], [])
    state.begin()
    for microbatch in (0, 1, 0, 1):

        def count():
            glue.count += 1
            glue.names.append("x")

        turn(state, microbatch, count)
    state.end()
    assert (glue.count, glue.names) == (4, ["x"] * 4)


def test_statistics_of_real_tensors_are_shared_in_every_step():
    glue = Glue(mean=torch.zeros(()))
    state = MicrobatchState([glue], [])
    for _ in range(2):
        state.begin()
        for microbatch in (0, 1, 0, 1):
            turn(state, microbatch, lambda: setattr(glue, "mean", glue.mean + 1))
        state.end()
    assert glue.mean == 8


def test_large_containers_are_left_alone():
    glue = Glue(history=[0] * (MOST_ENTRIES + 1))
    state = MicrobatchState([glue], [])
    state.begin()
    (a,) = tensors(1)
    turn(state, 0, lambda: glue.history.append(a))
    assert glue.history[-1] is a


def test_nothing_is_held_after_the_step():
    glue = Glue(kept=None)
    state = MicrobatchState([glue], [])
    state.begin()
    turn(state, 0, lambda: setattr(glue, "kept", torch.zeros(2)))
    state.end()
    reference = weakref.ref(glue.kept)
    glue.kept = None
    assert reference() is None


def test_a_loop_over_a_dict_goes_on_where_it_was_paused():
    a, b, c, d = tensors(4)
    glue = Glue(features={})
    state = MicrobatchState([glue], [])
    state.begin()
    loops = {}

    def fill(*values):
        glue.features.update(enumerate(values))
        loops[values] = iter(glue.features.values())
        assert next(loops[values]) is values[0]

    turn(state, 0, lambda: fill(a, b))
    turn(state, 1, lambda: fill(c, d))
    assert glue.features == {}
    turn(state, 0, lambda: [item is b or 1 / 0 for item in loops.pop((a, b))])
    turn(state, 1, lambda: [item is d or 1 / 0 for item in loops.pop((c, d))])
    state.end()
    assert list(glue.features.values()) == [c, d]


@pytest.mark.parametrize(
    ("now", "found", "value", "expected"),
    [
        pytest.param(5, 5, 7, 7, id="nobody else has written"),
        pytest.param(8, 5, 7, 10, id="both have counted"),
        pytest.param(MISSING, 5, 7, 2, id="another has deleted the count"),
        pytest.param("b", "a", "c", "c", id="the last one wins"),
        pytest.param([1, 2], [1], [1, 3], [1, 2, 3], id="both have appended"),
        pytest.param([8, 0], [0, 0], [0, 9], [8, 9], id="both have filled slots"),
        pytest.param([1, 2], [1], [], [], id="emptied"),
    ],
)
def test_changes_of_several_microbatches_are_merged(now, found, value, expected):
    assert merged(now, found, value) == expected


class Made(OrderedDict):
    """Like the table of activations in transformers: makes a new object at each look-up."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


def test_entries_of_a_table_that_makes_what_it_returns_stay_as_they_are():
    glue = Glue(table=Made(layer=list))
    state = MicrobatchState([glue], [])
    state.begin()
    turn(state, 0, lambda: glue.table["layer"].append(tensors(1)))
    turn(state, 1, lambda: None)
    state.end()
    assert dict(dict.items(glue.table)) == {"layer": list}
