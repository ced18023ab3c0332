"""Convolutions with some of the channels compute what whole ones compute."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.layers.base import CannotSplit
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelConv, RowParallelConv
from smp_strategy.testing import run_ranks
from tests.ranks.split_layers import group_of_all, random, same_gradients, sent

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Block(nn.Module):
    """All channels, each channel by itself, all channels."""

    def __init__(self, dims: int, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = KINDS[dims]
        self.up = kind(5, 8, 3, padding=1, **options)
        self.each = kind(8, 16, 3, groups=8, stride=2)
        self.down = kind(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.each(self.up(x).relu()).relu())


def split_block(block: nn.Module, group: TensorGroup) -> None:
    ColumnParallelConv.from_dense(block.up, group)
    ColumnParallelConv.from_dense(block.each, group, is_inside=True)
    RowParallelConv.from_dense(block.down, group, granule=2)


def blocks() -> None:
    for dims in KINDS:
        block, x = Block(dims), random(2, 5, *[7] * dims)
        same_gradients(block, split_block, x)
        same_gradients(block, split_block, x[0])  # without a batch
    same_gradients(Block(2, padding_mode="circular", bias=False), split_block, random(2, 5, 7, 7))
    group, split = group_of_all(), Block(1)
    split_block(split, group)
    x = random(2, 5, 7).requires_grad_()
    with sent(group) as forward:
        y = split(x)
    with sent(group) as backward:
        y.sum().backward()
    assert forward == [y.nbytes]
    assert backward == [x.nbytes]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_region_of_convolutions_computes_what_whole_ones_do_for_one_sum_each_way(ranks: int) -> None:
    run_ranks(blocks, ranks)


def alone() -> None:
    for groups in (1, 5):
        torch.manual_seed(0)
        layer = nn.Conv2d(5, 10, 3, groups=groups)
        same_gradients(layer, partial(ColumnParallelConv.from_dense, gather_output=True), random(2, 5, 7, 7))
    layer = nn.Conv2d(5, 10, 3)
    row = partial(RowParallelConv.from_dense, splits_input=True)
    same_gradients(layer, row, random(2, 5, 7, 7))
    same_gradients(layer, row, random(2, 5, 7, 7).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_convolution_alone_gathers_its_outputs_or_takes_its_inputs_of_uneven_parts(ranks: int) -> None:
    run_ranks(alone, ranks)


def round_trips() -> None:
    group = group_of_all()
    for groups in (1, 4):
        layer = nn.Conv2d(8, 8, 3, groups=groups)
        before, attributes, text = copy.deepcopy(layer), set(vars(layer)), repr(layer)
        ColumnParallelConv.from_dense(layer, group)
        assert layer.out_channels == 8 // group.size
        assert layer.groups == max(groups // group.size, 1)
        layer.to_dense()
        assert (set(vars(layer)), repr(layer), type(layer)) == (attributes, text, nn.Conv2d)
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before.parameters(), strict=True))


def test_a_convolution_comes_back_bit_by_bit() -> None:
    run_ranks(round_trips, 2)


class Own(nn.Conv2d):
    """Computes in its own way."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.std(), bias)


def test_convolutions_that_cannot_be_split_are_refused_with_the_reason() -> None:
    group = TensorGroup(None, rank=0, size=4)
    with pytest.raises(CannotSplit, match="4 groups are not added up"):
        RowParallelConv.from_dense(nn.Conv2d(8, 8, 3, groups=4), group)
    with pytest.raises(CannotSplit, match="cannot be cut for 4 ranks"):
        ColumnParallelConv.from_dense(nn.Conv2d(8, 8, 3, groups=2), group)
    with pytest.raises(CannotSplit, match="needs all input channels"):
        ColumnParallelConv.from_dense(nn.Conv2d(8, 8, 3), group, is_inside=True)
    with pytest.raises(CannotSplit, match="2 channels in a group, where 3 stay together"):
        ColumnParallelConv.from_dense(nn.Conv2d(8, 8, 3, groups=4), group, granule=3)
    with pytest.raises(CannotSplit, match="Own computes it in its own way"):
        ColumnParallelConv.from_dense(Own(8, 8, 3), group)
    with pytest.raises(CannotSplit, match="ConvTranspose2d is no convolution"):
        ColumnParallelConv.from_dense(nn.ConvTranspose2d(8, 8, 3), group)
