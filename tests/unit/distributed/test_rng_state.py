"""Where generators are, in memory and in files."""

import random

import numpy
import torch

from smp_strategy.distributed.rng_state import (
    capture,
    drawing_from,
    global_state,
    replay_from_now,
    restore,
    set_global_state,
)
from smp_strategy.engine.saving.rank_generators import (
    are_equal,
    exceptions_to_first,
    of_rank,
    packed,
    set_of_rank,
    unpacked,
)


def draw():
    return float(torch.rand(())), random.random(), float(numpy.random.rand()), random.gauss(0, 1)


def test_a_state_survives_a_file_that_has_no_code(tmp_path):
    numpy.random.randn()  # has a second number in store
    random.gauss(0, 1)
    state = global_state()
    torch.save(packed(state), tmp_path / "state")
    drawn = draw(), numpy.random.randn()
    kept = torch.load(tmp_path / "state", weights_only=True)
    assert unpacked(kept) == state
    set_global_state(unpacked(kept))
    assert (draw(), numpy.random.randn()) == drawn


def test_the_generators_of_a_rank_go_on():
    host = torch.device("cpu")
    state = of_rank(host)
    drawn = draw()
    assert not are_equal(of_rank(host), state)
    set_of_rank(state, host)
    assert are_equal(of_rank(host), state)
    assert draw() == drawn


def test_nothing_is_left_of_draws_from_elsewhere():
    elsewhere = global_state()
    expected = draw()
    before = global_state()
    with drawing_from(elsewhere):
        assert draw() == expected
    assert global_state() == before


def test_ranks_that_draw_unlike_the_first_of_their_group_are_named():
    states = [{"state": torch.tensor(number)} for number in (1, 1, 2, 3)]
    assert exceptions_to_first(states, [[0, 1], [2, 3]]) == {3: states[3]}


def test_states_are_compared_by_value():
    one = {"a": [torch.zeros(2), (1, numpy.zeros(2))]}
    other = {"a": [torch.zeros(2), (1, numpy.zeros(2))]}
    assert are_equal(one, other)
    other["a"][0][1] = 1
    assert not are_equal(one, other)
    assert not are_equal({"a": 1}, {"b": 1})
    assert not are_equal([1], [1, 2])


def test_further_generators_are_captured_and_restored_together():
    given = torch.Generator()
    generators = [torch.default_generator, given]
    state = capture(generators, numpy=False)
    drawn = float(torch.rand(())), random.random(), float(torch.rand((), generator=given))
    before = numpy.random.rand()
    restore(state, generators)
    assert (float(torch.rand(())), random.random(), float(torch.rand((), generator=given))) == drawn
    assert numpy.random.rand() != before


def test_draws_are_replayed_as_often_as_needed_and_leave_nothing():
    replayed = replay_from_now(torch.device("cpu"))
    first = draw()
    before = global_state()
    for _ in range(2):
        with replayed():
            assert draw() == first
    assert global_state() == before
