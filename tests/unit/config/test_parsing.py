"""Values of options parsed from environment variables."""

from datetime import timedelta

import pytest

from smp_strategy.config.parsing import as_timeout, fits, parse
from smp_strategy.errors import ConfigError

Limit = int | str | tuple[int | str, ...] | None


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("16GiB", Limit, "16GiB"),
        ("4096", Limit, 4096),
        ("16GiB, 4096", Limit, ("16GiB", 4096)),
        ("", Limit, None),
        ("1, 2.5", tuple[float, ...] | None, (1.0, 2.5)),
        ("2", tuple[float, ...] | None, (2.0,)),
        ("1, 2,", tuple[float, ...] | None, (1.0, 2.0)),
        ("none", tuple[float, ...] | None, None),
        ("Block", tuple[str, ...], ("Block",)),
    ],
)
def test_a_list_is_written_with_commas(text, hint, value):
    assert parse(text, hint) == value
    assert fits(value, hint)


def test_a_text_that_does_not_parse_is_left_for_the_type_check():
    assert parse("1, fast", tuple[float, ...]) == (1.0, "fast")
    assert not fits((1.0, "fast"), tuple[float, ...])


def test_an_empty_item_of_a_list_is_kept_for_the_check_of_items():
    assert parse("1,,2", tuple[float, ...] | None) == (1.0, "", 2.0)
    assert parse(",a", tuple[str, ...]) == ("", "a")
    assert parse(",", Limit) == ("",)


def test_a_timeout_is_a_timedelta_or_seconds():
    assert as_timeout(5) == as_timeout(5.0) == as_timeout(timedelta(seconds=5)) == timedelta(seconds=5)
    assert as_timeout(None) is None


@pytest.mark.parametrize("value", [0, -1, True, "5", float("inf"), float("nan"), 1e300, timedelta(0), 1e-6, [5]])
def test_other_timeouts_are_refused(value):
    with pytest.raises(ConfigError, match="`timeout` must be a timedelta or seconds, finite and at least 1 s, but is"):
        as_timeout(value)
