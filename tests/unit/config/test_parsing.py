"""Values of options parsed from environment variables."""

import pytest

from smp_strategy.config.parsing import fits, parse

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
