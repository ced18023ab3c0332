"""A record that follows another one says what it would have said by itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.prediction import Made, Prediction
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.program_trace import Latest, ProgramTrace
from smp_strategy.pipeline.routing import Router

SPEC = TensorSpec((2,), (1,), torch.float32, torch.device("cpu"), True)
STAGE_OF = {"a": 0, "b": 1, "c": 2}


def prediction() -> Prediction:
    _, structure = pytree.tree_flatten(0)
    return Prediction(outputs=(Made(SPEC),), structure=structure, changed={}, aliases=(None,), random=False)


PREDICTIONS = [prediction(), prediction()]
# A call: what is called, which of its two predictions holds, and how far back its inputs were made; or a read.
CALL = st.tuples(st.sampled_from(["a", "b", "c", "op", "read"]), st.integers(0, 1), st.lists(st.integers(0, 3)))
PROGRAM = st.lists(CALL, max_size=12)


def write(program: list, record: ProgramTrace) -> None:
    values: list[Value] = []
    for name, which, back in program:
        inputs = tuple(values[-1 - number] for number in back if number < len(values))
        if name == "read":
            record.place(Event("read", "item", inputs, ()))
            continue
        if name == "op" and not inputs:
            values.append(record.given(SPEC, [1])[0])
            continue
        event, _ = record.call("op" if name == "op" else "unit", name, inputs, PREDICTIONS[which])
        values += event.outputs
    for value in values:
        record.home(value)
    record.end()


def record_of(program: list, latest: Latest, expected: list | None = None) -> ProgramTrace:
    record = ProgramTrace(lambda: Router(STAGE_OF, 3), expected, latest)
    write(program, record)
    return record


@given(PROGRAM, PROGRAM, PROGRAM)
def test_following_changes_nothing(first, second, third):
    latest = Latest()
    expected = [event.signature for event, _ in record_of(first, Latest()).events]
    for program in (first, second, first, first + third, first[: len(second)] + second):
        alone, following = record_of(program, Latest(), expected), record_of(program, latest, expected)
        assert following.events == alone.events
        assert following.left_plan == alone.left_plan
        assert [following.home(v) for e, _ in alone.events for v in e.outputs] == [
            alone.home(v) for e, _ in alone.events for v in e.outputs
        ]
        assert latest.trace is following


def test_the_same_path_is_taken_over_and_not_made_anew():
    latest = Latest()
    program = [("a", 0, []), ("b", 0, [0]), ("read", 0, [0]), ("c", 1, [0, 1])]
    first, second = record_of(program, latest), record_of(program, latest)
    assert all(mine is its for mine, its in zip(second.events, first.events, strict=True))


def test_records_do_not_keep_those_before_them():
    latest = Latest()
    first = record_of([("a", 0, [])], latest)
    second = record_of([("a", 0, [])], latest)
    assert second._leader is None
    assert latest.trace is second
    assert first is not second
