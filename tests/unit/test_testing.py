"""Forked ranks and what they inherit."""

import gc
import os

import pytest

from smp_strategy.testing import run_ranks


class Garbage:
    """An object in a cycle, which tells the process that ends it."""

    def __init__(self, folder):
        self.itself, self.folder = self, folder

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


def collect():
    is_collecting = gc.isenabled()
    gc.collect()
    return is_collecting


def test_ranks_leave_the_garbage_of_their_parent_alone(no_collection, tmp_path):
    Garbage(tmp_path)
    assert run_ranks(collect, 2) == [True, True]
    assert not any(tmp_path.iterdir())
    gc.collect()
    assert [each.name for each in tmp_path.iterdir()] == [str(os.getpid())]
