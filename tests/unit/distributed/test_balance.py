"""Dealing out parameters over replicas."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.distributed.balance import balanced


def loads(sizes: list[int], shares: list[int], num_shares: int) -> list[int]:
    return [sum(size for size, share in zip(sizes, shares, strict=True) if share == one) for one in range(num_shares)]


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_no_share_is_larger_than_the_mean_and_an_item(sizes, num_shares):
    found = loads(sizes, balanced(sizes, num_shares), num_shares)
    assert sum(found) == sum(sizes)
    assert max(found) * num_shares <= sum(sizes) + (num_shares - 1) * max(sizes, default=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_share_is_within_a_third_of_the_best(sizes, num_shares):
    best = min(
        max(loads(sizes, list(shares), num_shares))
        for shares in itertools.product(range(num_shares), repeat=len(sizes))
    )
    assert 3 * max(loads(sizes, balanced(sizes, num_shares), num_shares)) <= 4 * best


def test_equal_items_go_round():
    assert balanced([1, 1, 1, 1], 2) == [0, 1, 0, 1]
