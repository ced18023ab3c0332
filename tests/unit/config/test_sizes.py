"""Amounts of memory as text."""

import pytest

from smp_strategy.config.sizes import parse_bytes, show_count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("7B", 7),
        ("512MiB", 512 * 2**20),
        ("16 GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("16GB", 16 * 10**9),
        (" 2 KB ", 2000),
    ],
)
def test_units_are_those_of_1024_and_those_of_1000(text, size):
    assert parse_bytes(text) == size


def test_a_large_number_of_bytes_is_exact():
    assert parse_bytes("9007199254740993") == 2**53 + 1


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiB 2", "1G", "1e3", "1,5GiB", "nan", "\u0661GiB"])
def test_everything_else_is_refused(text):
    with pytest.raises(ValueError, match="is no amount of memory. Write a number and one of B, KiB, .*: 16GiB"):
        parse_bytes(text)


def test_one_thing_has_no_plural():
    assert [show_count(number, "unit") for number in (0, 1, 2)] == ["0 units", "1 unit", "2 units"]
    assert [show_count(number, "microbatch", "microbatches") for number in (1, 2)] == ["1 microbatch", "2 microbatches"]
