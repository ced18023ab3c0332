"""One OpenMP thread before anything computes: forked ranks hang otherwise (and share two cores).

With ``--sparse`` grids of cases are thinned out, see :mod:`tests.grids`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that transformers loads with cannot begin to use PyTorch's thread pool in a forked process ("Invalid thread
# pool!", now and then).
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.grids import MOST, enough, spaced

torch.set_num_threads(1)
# Examples take long on a machine that does other work.
settings.register_profile("suite", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sparse", action="store_true", help="of grids, run as many cases as tests/grids.py says")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_in(n): of a table, every n-th case is enough for `--sparse` in any folder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--sparse"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for cases in tests.values() for item in sparse(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def sparse(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of the ``cases`` of a test that are run."""
    if mark := cases[0].get_closest_marker("one_in"):
        return cases[:: mark.args[0]]
    most = MOST.get(cases[0].nodeid.split("/")[1])
    if most is None:
        return cases
    # The names of the values, one for each `parametrize`: pytest tells nowhere else which values came together.
    values = [dict(enumerate(call._idlist)) if (call := getattr(case, "callspec", None)) else {} for case in cases]
    if len(values[0]) > 1:
        cases = [cases[number] for number in enough(values)]
    return [cases[number] for number in spaced(len(cases), most)]
