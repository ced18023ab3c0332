"""One OpenMP thread before anything computes: forked ranks hang otherwise (and share two cores).

With ``--sparse`` grids of cases are thinned out, see :mod:`tests.grids`. A process is warm before it forks ranks, see
:mod:`tests.warm`.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that transformers loads with cannot begin to use PyTorch's thread pool in a forked process ("Invalid thread
# pool!", now and then).
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.grids import DAYS, day_of_commit, runs_today
from tests.warm import warm_up

torch.set_num_threads(1)
# Examples take long on a machine that does other work.
settings.register_profile("suite", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# In this order: what takes longest begins first. The others take milliseconds each and fill the gaps.
FORKING = ("examples", "integrations", "ranks", "parity")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sparse", action="store_true", help="of grids, run the cases of a day, see tests/grids.py")
    parser.addoption("--day", type=int, help="run the cases of this day, not of the last commit's")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "daily: one of its cases runs each day, see tests/grids.py")
    config.addinivalue_line("markers", "dear: costs several seconds; takes turns with others, see tests/grids.py")
    config.addinivalue_line("markers", "one_in(n): one of n cases runs in a day, see tests/grids.py")
    if config.option.day is None:  # workers get the options of the process that starts them
        config.option.day = day_of_commit()


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"cases of grids: --sparse --day {config.option.day}" if config.option.sparse else None


def pytest_collection_finish() -> None:
    # What is imported by now stays. Otherwise each full collection visits it all, which takes half a second, hundreds
    # of times.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if folder_of(item) in FORKING:
        warm_up()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("This test alone", f".venv/bin/python -m pytest '{item.nodeid}'"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {folder: number for number, folder in enumerate(FORKING)}
    items.sort(key=lambda item: order.get(folder_of(item), len(order)))
    if not config.option.sparse:
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        id(item) for number, cases in enumerate(tests.values()) for item in sparse(cases, config.option.day + number)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def folder_of(item: pytest.Item) -> str:
    """Name of the folder in tests/ that ``item`` is in."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


def sparse(cases: list[pytest.Item], start: int) -> list[pytest.Item]:
    """Those of the ``cases`` of a test that run, see :mod:`tests.grids`."""
    mark = cases[0].get_closest_marker("one_in")
    days = 1 if cases[0].get_closest_marker("daily") else DAYS.get(folder_of(cases[0]))
    every = mark.args[0] if mark else days * len(cases) if days else 1
    every *= 2 if cases[0].get_closest_marker("dear") else 1
    return [case for number, case in enumerate(cases) if runs_today(number, every, start)]
