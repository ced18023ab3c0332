"""The plan of a save to files of whole tensors."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_strategy.checkpoint.spread_state import (
    FirstError,
    PlannedFile,
    PlannedTensor,
    assign_writers,
    each_in_turn,
    in_rounds,
    portions_in_turn,
)
from smp_strategy.model.deferred_tensor import entries_of, entry
from smp_strategy.testing import run_ranks

RANKS = 4
AMOUNTS = st.lists(st.integers(0, 5), min_size=RANKS, max_size=RANKS)


@settings(deadline=None)
@given(st.lists(AMOUNTS, max_size=8), st.sets(st.integers(0, RANKS - 1), min_size=1))
def test_a_writer_can_write_and_has_as_much_of_its_file_as_any_that_can(held, writers):
    writers = sorted(writers)
    found = assign_writers(held, writers)
    assert len(found) == len(held)
    for writer, amounts in zip(found, held, strict=True):
        assert writer in writers
        assert amounts[writer] == max(amounts[each] for each in writers)


def test_files_of_which_all_have_the_same_are_dealt_out():
    assert sorted(assign_writers([[1, 1, 1, 1]] * 8, [0, 1, 2, 3])) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert assign_writers([[3, 1], [1, 3], [4, 0]], [0, 1]) == [0, 1, 0]
    assert assign_writers([[0, 9]], [0]) == [0]  # rank 1 does not see the folder


def a_file(number, entries):
    tensors = {
        f"{number}.{place}": PlannedTensor.of(entry(name, (2,), torch.float32)) for place, name in enumerate(entries)
    }
    return PlannedFile(f"{number}", tensors, None)


FILES = st.lists(st.lists(st.sampled_from("abcdef"), max_size=5), max_size=6)


@settings(deadline=None)
@given(FILES, st.data())
def test_each_tensor_is_in_one_portion_and_writers_take_turns(entries, data):
    files = [a_file(number, each) for number, each in enumerate(entries)]
    writers = [data.draw(st.integers(0, 2)) for _ in files]
    portions = portions_in_turn(files, writers)
    names = [name for portion in portions for name in portion.names]
    assert sorted(names) == sorted(name for file in files for name in file.tensors)
    for portion in portions:
        for name in portion.names:
            assert entries_of(files[portion.file].tensors[name].recipe) == {portion.entries[0]}
    for writer in range(3):
        mine = [portion.file for portion in portions if writers[portion.file] == writer]
        assert mine == sorted(mine)  # one file after the other
    for number, portion in enumerate(portions):  # nobody is served twice while another waits
        later = {writers[each.file] for each in portions[number + 1 :]}
        again = next((each for each in portions[number + 1 :] if writers[each.file] == writers[portion.file]), None)
        if again is not None:
            between = portions[number + 1 : portions.index(again, number + 1)]
            after = {writers[each.file] for each in portions[portions.index(again, number + 1) :]}
            assert {writers[each.file] for each in between} >= (later & after) - {writers[portion.file]}


def test_tensors_that_are_made_of_the_same_entry_are_one_portion():
    a, b = entry("a", (4, 2), torch.float32), entry("b", (4, 2), torch.float32)
    made = {"b": b, "a.0": a[0], "ab": torch.cat([a, b]), "a.1": a[1]}
    file = PlannedFile("x", {name: PlannedTensor.of(each) for name, each in made.items()}, None)
    found = [(portion.names, portion.entries) for portion in portions_in_turn([file], [0])]
    assert found == [(("b",), ("b",)), (("a.0", "a.1"), ("a",)), (("ab",), ("a", "b"))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_rounds_are_all_portions_in_order_and_not_too_large(sizes, most):
    portions = portions_in_turn([a_file(0, [str(number) for number in range(len(sizes))])], [0])
    rounds = list(in_rounds(portions, sizes, most))
    assert [each for part in rounds for each in part] == portions
    number = 0
    for part in rounds:
        assert len(part) == 1 or sum(sizes[number : number + len(part)]) <= most
        number += len(part)


def fail_before_the_first_part():
    errors = FirstError()
    if dist.get_rank() == 1:
        errors.attempt(lambda: 1 / 0)
    each_in_turn([], [], print, errors, "writing")


def test_an_error_before_the_first_part_is_raised_on_all_ranks_also_if_there_are_no_parts():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_ranks(fail_before_the_first_part, 2)
