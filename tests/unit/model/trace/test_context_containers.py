"""What a call adds to containers in context variables is found, taken out, and put in again."""

import contextvars
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.side_effects import additions, collector_key, put_into_collectors

COLLECTED: ContextVar[Any] = ContextVar("collected")
NAMESAKE: ContextVar[Any] = ContextVar("collected")


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Runs ``test`` in a context of its own."""
    return lambda: contextvars.Context().run(test)


def test_additions_are_taken_out_and_can_be_put_in_again() -> None:
    @alone
    def run() -> None:
        contents: dict[str, Any] = {"maps": [1], "one": 1}
        COLLECTED.set(contents)
        with additions() as added:
            contents["maps"].append(2)
            contents["two"] = 2
        assert contents == {"maps": [1], "one": 1}
        put_into_collectors(added)
        assert contents == {"maps": [1, 2], "one": 1, "two": 2}

    run()


def test_containers_are_put_back_although_the_call_fails() -> None:
    @alone
    def run() -> None:
        contents: list[int] = []
        COLLECTED.set(contents)
        with pytest.raises(ZeroDivisionError), additions():
            contents.extend(1 // number for number in (1, 0))
        assert contents == []

    run()


def test_removals_are_refused() -> None:
    @alone
    def run() -> None:
        contents = [1]
        COLLECTED.set(contents)
        with pytest.raises(UnsupportedError, match="removes items of the list"), additions():
            contents.clear()
        assert contents == [1]

    run()


def test_variables_of_one_name_are_refused_if_one_is_added_to() -> None:
    @alone
    def run() -> None:
        COLLECTED.set([])
        NAMESAKE.set([])
        with additions() as added:
            pass
        assert not added
        with pytest.raises(UnsupportedError, match="several of this name"), additions():
            NAMESAKE.get().append(1)

    run()


def test_the_key_tells_what_is_collected_but_not_how_much() -> None:
    @alone
    def run() -> None:
        keys = [collector_key()]
        for contents in ({}, {"maps": []}, {"maps": [1]}, {"logits": []}):
            COLLECTED.set(contents)
            keys.append(collector_key())
        assert len(set(keys)) == len(keys)
        COLLECTED.set({"maps": [1, 2]})
        assert collector_key() == keys[3]

    run()
