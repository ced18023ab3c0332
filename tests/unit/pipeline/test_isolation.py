"""Turns of microbatches on plain values, without programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.isolation.written_values import is_same_value


class Turns:
    """Three microbatches that set attributes of one module."""

    def __init__(self, **values):
        self.module = nn.Module()
        vars(self.module).update(values)
        self.state = MicrobatchState([self.module], [])
        self.begin()

    @property
    def values(self):
        return {name: value for name, value in vars(self.module).items() if name not in vars(nn.Module())}

    def begin(self):
        self.state.begin()

    def turn(self, microbatch, **written):
        """Returns what it finds before it writes."""
        self.state.enter(microbatch)
        found = self.values
        for name, value in written.items():
            self.state.touch(self.module, name)
            setattr(self.module, name, found[name] + 1 if value == "count" else value)
        self.state.leave(microbatch)
        return found


def test_a_flag_is_found_by_nobody_else():
    turns = Turns(flag=True)
    assert turns.turn(0, flag=False) == {"flag": True}
    assert turns.turn(1) == {"flag": True}
    assert turns.turn(0, flag=True) == {"flag": False}
    turns.state.end_of(0)
    assert turns.values == {"flag": True}


def test_what_is_changed_for_good_is_there_once_its_microbatch_ends():
    turns = Turns(name="a")
    turns.turn(0, name="b", new=None)
    assert turns.values == {"name": "a"}
    turns.state.end_of(0)
    assert turns.values == {"name": "b", "new": None}
    assert turns.turn(1, name="c") == {"name": "b", "new": None}
    turns.begin()
    assert turns.turn(2) == {"name": "b", "new": None}, "nothing of a step that was broken off is left"


def test_what_is_set_to_what_it_was_is_written():
    turns = Turns(mode="policy")
    turns.turn(0, mode="reference")
    turns.turn(1, mode="policy")
    turns.state.end_of(0)
    assert turns.turn(1, mode="reference") == {"mode": "policy"}


def test_state_that_is_known_is_found_by_those_that_come_later():
    turns = Turns(started=False)
    turns.turn(0, started=True)
    turns.state.end_of(0)
    turns.module.started = False
    turns.begin()
    turns.turn(0, started=True)
    assert turns.turn(1) == {"started": True}


def test_a_number_that_has_been_a_switch_is_one():
    turns = Turns(scale=1.0)
    turns.turn(0, scale=2.0)
    turns.turn(0, scale=1.0)
    turns.state.end_of(0)
    turns.begin()
    turns.turn(0, scale=2.0)
    assert turns.turn(1) == {"scale": 1.0}


def test_others_that_have_gone_by_a_number_that_is_put_back_are_told():
    turns = Turns(scale=1.0)
    turns.turn(0, scale=2.0)
    assert turns.turn(1) == {"scale": 2.0}
    turns.turn(0, scale=1.0)
    with pytest.raises(UnsupportedError, match=r"`scale` for a while and puts 1.0 back"):
        turns.state.end_of(0)


def test_code_that_runs_once_for_all_finds_and_changes_what_the_last_one_has():
    turns = Turns(flag=True)
    turns.turn(0, flag=False)
    turns.turn(1, flag=False)
    with turns.state.at_barrier(1):
        assert turns.values["flag"] is False
        turns.module.flag = None
    assert turns.values["flag"] is True
    assert turns.turn(0) == turns.turn(1) == {"flag": None}


@given(st.lists(st.integers(0, 2), max_size=20))
def test_counts_count_in_any_order_of_turns(order):
    turns = Turns(count=0)
    for microbatch in order:
        turns.turn(microbatch, count="count")
    turns.state.end()
    assert turns.values["count"] == len(order)


def test_plain_values_that_were_made_anew_are_the_same():
    assert is_same_value(["default"], ["default"])
    assert is_same_value({"a": (1, None)}, {"a": (1, None)})
    assert not is_same_value(1, True)
    assert not is_same_value([1], [2])
    assert not is_same_value(object(), object())
