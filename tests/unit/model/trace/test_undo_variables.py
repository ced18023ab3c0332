"""What code does to variables around its functions is undone."""

import functools
import textwrap
import types
from contextlib import suppress

import pytest
import torch
from torch import nn

from smp_strategy.model.trace.undo_variables import variables_restored

LOSSES: list[float] = []
NESTED = {"train": [1], "kept": {"deep": [2]}}
COUNT = 0
UNTOUCHED = [1]


def note(value):
    global COUNT, FRESH
    COUNT += 1
    FRESH = value
    LOSSES.append(value)


class Counting(nn.Module):
    seen: list[float] = []

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        note(1.0)
        NESTED["train"].append(3)
        NESTED["kept"]["deep"].clear()
        self.seen.append(2.0)
        self.inner(x)
        return x

    @property
    def last(self):
        return [each.append(0) for each in (UNTOUCHED,)]

    @staticmethod
    def counted():
        return NESTED


def around():
    total, rows = 0, {"a": 1}

    def count(x):
        nonlocal total
        total += 1
        rows["b"] = 2
        return [rows.update(c=x) for _ in range(2)]

    return count, lambda: (total, dict(rows))


def state():
    return list(LOSSES), repr(NESTED), COUNT, "FRESH" in globals(), list(Counting.seen)


@pytest.mark.parametrize("fails", [False, True])
def test_variables_that_the_code_of_modules_names_hold_what_they_held(fails):
    count, shown = around()
    model = nn.Sequential(Counting(functools.partial(count)))
    held, before, variables = (LOSSES, NESTED, Counting.seen), state(), shown()
    with suppress(ZeroDivisionError), variables_restored(model.modules(), functools.partial(count)):
        model(torch.ones(1))
        assert state() != before
        assert shown() != variables
        if fails:
            raise ZeroDivisionError
    assert state() == before
    assert shown() == variables
    assert held == (LOSSES, NESTED, Counting.seen)
    assert all(one is other for one, other in zip(held, (LOSSES, NESTED, Counting.seen), strict=True))


def test_what_the_step_names_counts_too_and_its_cells_may_be_empty():
    def step(x):
        LOSSES.append(later if x else 1.0)

    with variables_restored([], step):
        step(False)
        later = 1
    assert LOSSES == []
    assert later == 1


def test_methods_and_what_wraps_functions_are_looked_into():
    @torch.no_grad()
    def wrapped():
        LOSSES.append(1.0)

    for step in (wrapped, Counting(nn.Identity()).forward):
        with variables_restored([], functools.partial(step, *([torch.ones(1)] if step is not wrapped else []))):
            step(*([torch.ones(1)] if step is not wrapped else []))
            assert LOSSES
        assert LOSSES == []


def test_notebooks_have_no_file():
    notebook = types.ModuleType("__main__")
    exec(
        textwrap.dedent("""
        def step():
            global count
            count += 1
            rows.append(count)

        count, rows = 0, []
    """),
        vars(notebook),
    )
    with variables_restored([], notebook.step):
        notebook.step()
    assert (notebook.count, notebook.rows) == (0, [])


def test_libraries_keep_what_they_have_noted():
    library = types.ModuleType("a_library_without_a_file")
    exec("def step():\n    rows.append(1)\nrows = []", vars(library))
    with variables_restored([nn.Linear(1, 1)], library.step):
        library.step()
    assert library.rows == [1]
