"""The beginning of a run."""

import pytest

from smp_strategy.engine.lifecycle.run_lifecycle import ensure_group
from smp_strategy.errors import ConfigError

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("WORLD_SIZE", "abc", "is 'abc'"),
        ("RANK", "-1", "is '-1'"),
        ("MASTER_PORT", "", "is ''"),
        ("RANK", None, "is not"),
    ],
)
def test_a_variable_of_the_launcher_that_is_no_number_is_named(name, value, found, monkeypatch):
    for each, text in (LAUNCHED | {name: value}).items():
        monkeypatch.delenv(each, raising=False) if text is None else monkeypatch.setenv(each, text)
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, but {found}.*torchrun"):
        ensure_group("cpu", "gloo", is_launched=True)
