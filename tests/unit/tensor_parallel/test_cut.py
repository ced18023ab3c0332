"""How parameters are divided over tensor-parallel ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.tensor_parallel.cut import Cut


@given(
    num_ranks=st.integers(1, 5),
    num_blocks=st.integers(1, 4),
    granule=st.integers(1, 3),
    granules=st.integers(5, 12),
    dim=st.integers(0, 2),
)
def test_parts_of_all_ranks_are_the_whole_tensor_again(
    num_ranks: int, num_blocks: int, granule: int, granules: int, dim: int
) -> None:
    length = num_blocks * granule * granules
    cut = Cut.evenly(dim, length, num_ranks, num_blocks=num_blocks, granule=granule)
    shape = [2, 2, 2]
    shape[dim] = length
    whole = torch.randn(shape)
    parts = [cut.part(whole, rank) for rank in range(num_ranks)]
    assert [part.shape[dim] for part in parts] == [cut.length_of(rank) for rank in range(num_ranks)]
    assert cut.length == length
    assert torch.equal(cut.join(parts), whole)
    lengths = {part.shape[dim] // (num_blocks * granule) for part in parts}
    assert max(lengths) - min(lengths) <= 1


def test_every_rank_has_a_part_of_each_fused_matrix() -> None:
    cut = Cut.evenly(0, 12, 2, num_blocks=2, granule=2)
    whole = torch.arange(12)
    assert cut.part(whole, 0).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert cut.part(whole, 1).tolist() == [4, 5, 10, 11]
    part = torch.zeros(4, dtype=torch.float64)
    cut.fill(part, whole, 1)
    assert part.tolist() == [4, 5, 10, 11]


@pytest.mark.parametrize(("length", "num_blocks", "granule"), [(7, 2, 1), (12, 1, 5), (4, 1, 4)])
def test_what_does_not_fit_is_refused(length: int, num_blocks: int, granule: int) -> None:
    with pytest.raises(ValueError, match=f"{length} elements"):
        Cut.evenly(0, length, 2, num_blocks=num_blocks, granule=granule)
