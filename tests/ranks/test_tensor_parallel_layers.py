"""Split layers compute what dense ones compute, forward and backward."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.tensor_parallel.layers.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from smp_strategy.testing import run_ranks
from tests.ranks.split_layers import group_of_all, random, same_gradients, sent


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


def transposed(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def split_mlp(mlp: nn.Module, group: TensorGroup) -> None:
    ColumnParallelLinear.from_dense(mlp.up, group)
    RowParallelLinear.from_dense(mlp.down, group)


def mlps() -> None:
    for bias in (True, False):
        same_gradients(MLP(linear(6, 10, bias), linear(10, 6, bias)), split_mlp, random(2, 3, 6))
    same_gradients(MLP(transposed(6, 10), transposed(10, 6)), split_mlp, random(2, 3, 6))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_column_and_a_row_parallel_layer_compute_what_dense_ones_do(ranks: int) -> None:
    run_ranks(mlps, ranks)


def with_ends() -> None:
    for layer in (linear(7, 9), linear(7, 9, False), transposed(7, 9)):
        for blocks in (1, 3) if group_of_all().size < 4 else (1,):
            column = partial(ColumnParallelLinear.from_dense, num_blocks=blocks, gather_output=True)
            same_gradients(layer, column, random(2, 3, 7))
        row = partial(RowParallelLinear.from_dense, splits_input=True)
        same_gradients(layer, row, random(2, 3, 7))
        same_gradients(layer, row, random(7))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_alone_gathers_its_outputs_or_takes_its_inputs_of_uneven_parts(ranks: int) -> None:
    run_ranks(with_ends, ranks)


def embeddings() -> None:
    tokens = torch.tensor([[0, 3, 10, 3], [7, 7, 1, 4]])
    for padding in (None, 3, 10):
        torch.manual_seed(0)
        layer = nn.Embedding(11, 5, padding_idx=padding)
        same_gradients(layer, VocabParallelEmbedding.from_dense, tokens)
        same_gradients(layer, HiddenParallelEmbedding.from_dense, tokens)
        same_gradients(layer, VocabParallelEmbedding.from_dense, tokens.int())


@pytest.mark.parametrize("ranks", [2, 4])
def test_embeddings_find_what_dense_ones_find_also_of_a_vocabulary_that_does_not_divide(ranks: int) -> None:
    run_ranks(embeddings, ranks)


def round_trips() -> None:
    group = group_of_all()
    for layer, split in (
        (linear(7, 12), lambda layer: ColumnParallelLinear.from_dense(layer, group, num_blocks=3)),
        (linear(7, 12), lambda layer: RowParallelLinear.from_dense(layer, group)),
        (transposed(7, 12), lambda layer: ColumnParallelLinear.from_dense(layer, group, num_blocks=3)),
        (transposed(7, 12), lambda layer: RowParallelLinear.from_dense(layer, group)),
        (nn.Embedding(11, 5), lambda layer: VocabParallelEmbedding.from_dense(layer, group)),
        (nn.Embedding(11, 5), lambda layer: HiddenParallelEmbedding.from_dense(layer, group)),
    ):
        before, parameters = copy.deepcopy(layer), list(layer.parameters())
        names, kind, text = list(layer.state_dict()), type(layer), repr(layer)
        attributes = set(vars(layer))
        assert split(layer) is layer
        assert isinstance(layer, kind)
        assert f"rank {group.rank} of {group.size}" in repr(layer) or kind is Conv1D
        assert list(layer.state_dict(keep_vars=True)) == names
        with pytest.raises(UnsupportedError, match="this rank's part of `weight` only"):
            layer.state_dict()
        assert all(one is other for one, other in zip(layer.parameters(), parameters, strict=True))
        assert sum(p.numel() for p in parameters) < sum(p.numel() for p in before.parameters())
        assert layer.to_dense() is layer
        assert type(layer) is kind
        assert repr(layer) == text
        assert set(vars(layer)) == attributes
        assert all(one is other for one, other in zip(layer.parameters(), parameters, strict=True))
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_comes_back_bit_by_bit_as_the_same_object_with_the_same_parameters(ranks: int) -> None:
    run_ranks(round_trips, ranks)


class Attention(nn.Module):
    """Three layers that read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(q.sigmoid() * k + v)


def split_attention(attention: nn.Module, group: TensorGroup) -> None:
    for layer in (attention.q, attention.k, attention.v):
        ColumnParallelLinear.from_dense(layer, group, shares_input=True)
    RowParallelLinear.from_dense(attention.o, group)


def bytes_of_steps() -> None:
    group = group_of_all()
    whole = 2 * 3 * 8 * 4
    for model, split in ((Attention(), split_attention), (MLP(linear(8, 8), linear(8, 8)), split_mlp)):
        for frozen in (False, True):
            split_model = copy.deepcopy(model).requires_grad_(not frozen)
            split(split_model, group)
            x = random(2, 3, 8).requires_grad_()
            with sent(group) as forward:
                y = split_model(x)
            with sent(group) as backward:
                y.sum().backward()
            assert forward == backward == [whole]
        same_gradients(model, split, random(2, 3, 8))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_region_costs_one_sum_of_a_whole_activation_forward_and_one_backward(ranks: int) -> None:
    run_ranks(bytes_of_steps, ranks)
