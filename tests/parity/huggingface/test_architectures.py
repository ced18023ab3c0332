"""One optimizer step on two stages gives the gradients and weights of one process, whatever the architecture."""

import warnings

import pytest
import transformers

from .compare import compare
from .table import ARCHITECTURES


@pytest.fixture(autouse=True)
def quiet():
    """Tiny configurations are odd ones, and some say so."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_a_step_of_two_stages_is_a_step_of_one_process(architecture):
    found = compare(architecture)
    assert found.is_right, found


def test_the_table_is_broad_and_names_every_architecture_once():
    names = list(map(str, ARCHITECTURES))
    assert len(names) == len(set(names)) >= 250
