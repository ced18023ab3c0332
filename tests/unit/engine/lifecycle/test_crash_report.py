"""What is left of tracebacks, and who prints one."""

import subprocess
import sys
import textwrap
import traceback

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.engine.lifecycle.crash_report import chosen, shorten
from tests.unit.without_torch import STAND_IN


@given(st.lists(st.booleans(), max_size=60))
def test_the_users_frames_and_the_innermost_is_shown_in_their_order_and_not_too_many(are_library):
    kept = chosen(are_library)
    assert kept == sorted(set(kept))
    assert len(kept) <= 8
    own = [number for number, is_library in enumerate(are_library) if not is_library]
    innermost = list(range(len(are_library)))[-1:]
    assert set(kept) <= {*own, *innermost}
    assert set(innermost) <= set(kept)
    assert kept[:1] == sorted({*own, *innermost})[:1]
    if len({*own, *innermost}) <= 8:
        assert set(kept) == {*own, *innermost}


def wrong_shapes():
    torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3)))(torch.ones(1, 5))


def deep(depth):
    if depth:
        deep(depth - 1)
    else:
        wrong_shapes()


def shown(call, *arguments):
    """The functions in the shortened traceback of what ``call`` raises, and all that is printed."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  (whatever it is)
        call(*arguments)
    shorten(caught.value)
    shorten(caught.value)  # a second time changes nothing
    functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    return functions, "".join(traceback.format_exception(caught.value))


def test_frames_of_libraries_are_left_out_but_for_the_innermost():
    functions, text = shown(wrong_shapes)
    # Of torch, the last of many; `shown` itself calls.
    assert functions == ["shown", "wrong_shapes", "forward"]
    assert text.count("SMP_FULL_TRACEBACK=1 shows all") == 1


def test_of_many_frames_the_outermost_and_the_innermost_are_shown():
    functions, _ = shown(deep, 30)
    assert functions == ["shown", "deep", "deep", "deep", "deep", "deep", "wrong_shapes", "forward"]


def chained():
    try:
        wrong_shapes()
    except RuntimeError as error:
        raise KeyError("behind it") from error


def test_errors_behind_an_error_are_shortened_as_well():
    _, text = shown(chained)
    assert text.count("Traceback (most recent call last)") == 2
    assert text.count('File "') == 3 + 2


def test_nothing_is_left_out_if_all_is_asked_for(monkeypatch):
    monkeypatch.setenv("SMP_FULL_TRACEBACK", "1")
    functions, text = shown(wrong_shapes)
    assert len(functions) > 3
    assert "left out" not in text


KEEP_SHORT = "from smp_strategy.engine.lifecycle.crash_report import keep_short\nkeep_short()\n"


def printed(body, **environment):
    script = STAND_IN + KEEP_SHORT + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    return done.stderr


def test_what_another_rank_has_failed_of_is_one_line():
    body = """
        from smp_strategy import PeerFailedError
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise PeerFailedError("rank 1 failed first: its own words") from error
    """
    told = printed(body)
    assert told == "smp_strategy.errors.PeerFailedError: rank 1 failed first: its own words\n"
    assert "ZeroDivisionError" in printed(body, SMP_FULL_TRACEBACK="1")
    # With very many ranks on a machine the first ones are enough.
    assert printed(body, LOCAL_RANK="7") == told
    assert printed(body, LOCAL_RANK="8") == ""


def test_an_error_of_ones_own_keeps_its_traceback():
    told = printed("def mine():\n    1 / 0\nmine()")
    assert told.count("ZeroDivisionError") == 1
    assert "in mine" in told


@pytest.mark.parametrize(
    "fails",
    [
        "open('/nowhere/at/all')",
        "raise RuntimeError('[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0')",  # of `torch.save`
    ],
)
def test_an_error_of_the_disk_is_told_once(fails):
    body = f"""
        from smp_strategy.errors import CheckpointError
        def save():
            try:
                try:
                    {fails}
                except Exception as error:
                    raise CheckpointError("it was not saved: no room") from error
            except CheckpointError as error:
                raise CheckpointError(str(error)) from error
        save()
    """
    told = printed(body)
    assert told.count("Traceback (most recent call last)") == 1
    assert told.count("it was not saved: no room") == 1
    assert "in save" in told
    assert printed(body, SMP_FULL_TRACEBACK="1").count("Traceback (most recent call last)") == 3


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 3)])
def test_a_long_story_is_told_by_the_rank_whose_it_is(local_rank, lines):
    body = """
        from smp_strategy import PeerFailedError
        raise PeerFailedError("rank 1 failed first: a story:\\nof rank 0\\nof rank 1")
    """
    told = printed(body, LOCAL_RANK=local_rank)
    assert told.splitlines()[0].startswith("smp_strategy.errors.PeerFailedError: rank 1 failed first: a story:")
    assert len(told.splitlines()) == lines
    assert ("the rest is in its output" in told) == (lines == 1)


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise ValueError("a mistake of the user")


def test_what_a_process_of_a_data_loader_tells_has_the_users_frames_only():
    _, text = shown(lambda: list(torch.utils.data.DataLoader(Failing(), num_workers=1)))
    told = text.partition("Original Traceback (most recent call last):\n")[2]
    assert told.splitlines()[0].endswith("in __getitem__")
    assert 'raise ValueError("a mistake of the user")' in told
    assert "worker.py" not in told
    assert "ValueError: a mistake of the user" in told
