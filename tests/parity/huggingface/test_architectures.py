"""One optimizer step on two stages gives the gradients and weights of one process, whatever the architecture."""

import warnings

import pytest
import transformers

from .architecture import Architecture
from .compare import Comparison, compare, compare_together
from .table import ARCHITECTURES

# As many as take a minute on a busy machine.
TOGETHER = 6


@pytest.fixture(autouse=True)
def quiet():
    """Tiny configurations are odd ones, and some say so."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def comparisons() -> dict[str, Comparison | None]:
    """What has been found, by name; ``None``: to be looked at alone."""
    return {}


def selected(request: pytest.FixtureRequest) -> list[Architecture]:
    """The architectures that this run of pytest compares."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [call.params["architecture"] for call in calls if call is not None]


@pytest.mark.one_in(30)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_a_step_of_two_stages_is_a_step_of_one_process(architecture, comparisons, request):
    if str(architecture) not in comparisons:
        first = selected(request).index(architecture)
        neighbours = selected(request)[first : first + TOGETHER]
        try:
            comparisons |= zip(map(str, neighbours), compare_together(neighbours), strict=True)
        except Exception:  # of one of them: it will fail alone, too
            comparisons |= dict.fromkeys(map(str, neighbours), None)
    found = comparisons[str(architecture)] or compare(architecture)
    assert found.is_right, found


def test_the_table_is_broad_and_names_every_architecture_once():
    names = list(map(str, ARCHITECTURES))
    assert len(names) == len(set(names)) >= 250
