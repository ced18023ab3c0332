"""Split layers in all that can be done with layers."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.pipeline.segments import Import, enter
from smp_strategy.pipeline.split_backward import backward_of_imports
from smp_strategy.tensor_parallel.autograd_collectives import add_up
from smp_strategy.tensor_parallel.layers.base import CannotSplit
from smp_strategy.tensor_parallel.layers.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from smp_strategy.tensor_parallel.region import Entered
from smp_strategy.testing import run_ranks
from tests.ranks.split_layers import assert_close, cuts_of, group_of_all, random, same_parts


class Block(nn.Module):
    """Two readers of one tensor, then a pair of layers, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.up, self.down = Conv1D(12, 8), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.q(x) * self.k(x).sigmoid())
        return x + self.down(F.gelu(self.up(self.norm(x))))


def split_block(block: nn.Module, group: TensorGroup) -> None:
    for layer in (block.q, block.k):
        ColumnParallelLinear.from_dense(layer, group, shares_input=True)
    RowParallelLinear.from_dense(block.o, group)
    ColumnParallelLinear.from_dense(block.up, group)
    RowParallelLinear.from_dense(block.down, group)


def twins() -> tuple[nn.Module, nn.Module, TensorGroup]:
    """A dense block, and one that is split."""
    group, dense, split = group_of_all(), Block(), Block()
    split_block(split, group)
    return dense, split, group


def run_both(call: object, tolerance: float, dtype: torch.dtype = torch.float32, frozen: tuple[str, ...] = ()) -> None:
    """Forward and backward of both through ``call``."""
    dense, split, group = twins()
    grads = []
    for block in (dense, split):
        block.to(dtype)
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("none",)))
        x = random(2, 3, 8).to(dtype).requires_grad_()
        y = call(block, x)
        y.float().pow(2).sum().backward()
        grads.append((y.detach(), x.grad))
    for found, expected in zip(grads[1], grads[0], strict=True):
        assert_close(found, expected, tolerance)
    same_parts(split, cuts_of(split), dense, group.rank, tolerance=tolerance)


def under_autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block(x)


def through_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x * 1, use_reentrant=False) + checkpoint(block, x * 2, use_reentrant=True)


def compiled(block: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own
        return torch.compile(block, backend="aot_eager")(x)


def usages() -> None:
    plain = nn.Module.__call__
    run_both(plain, 1e-5)
    run_both(plain, 1e-13, torch.float64)
    run_both(plain, 3e-2, torch.bfloat16)
    run_both(under_autocast, 3e-2)
    run_both(through_checkpoint, 1e-5)
    run_both(plain, 1e-5, frozen=("q", "up", "down"))
    run_both(plain, 1e-5, frozen=("q", "k", "o", "up", "down", "norm"))
    run_both(under_autocast, 3e-2, frozen=("q", "up"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_dtypes_autocast_checkpoints_and_frozen_weights_change_nothing(ranks: int) -> None:
    run_ranks(usages, ranks)


@pytest.mark.one_in(3)
def test_a_compiled_block_calls_its_split_layers() -> None:
    run_ranks(partial(run_both, compiled, 1e-5), 2)


def autocast_numbers() -> None:
    """A column of a product does not depend on the others, so its bits are those of the dense layer."""
    torch.manual_seed(0)
    group, dense = group_of_all(), nn.Linear(8, 12)
    x = random(3, 8)
    for shares in (False, True):
        split = copy.deepcopy(dense)
        ColumnParallelLinear.from_dense(split, group, shares_input=shares)
        found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, whole = split(found), dense(expected)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, split.cuts["bias"].part(whole.t(), group.rank).t())
        dense.zero_grad()
        before = group.sent_bytes
        y.float().sum().backward()
        whole.float().sum().backward()
        assert group.sent_bytes - before == x.numel() * 2, "the sum is not taken in bfloat16"
        assert found.grad.dtype == torch.float32
        assert torch.equal(split.weight.grad, split.cuts["weight"].part(dense.weight.grad, group.rank))
        assert torch.equal(split.bias.grad, split.cuts["bias"].part(dense.bias.grad, group.rank))
        # The tensor that came in under autocast is another one to layers outside.
        assert torch.equal(split(found), split.cuts["bias"].part(dense(expected).t(), group.rank).t())


def test_under_autocast_the_numbers_are_those_of_linear_layers_and_sums_are_as_small() -> None:
    run_ranks(autocast_numbers, 2)


def without_gradients() -> None:
    dense, split, group = twins()
    x = random(2, 3, 8)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_close(split(x), dense(x))
    split(x).sum().backward()  # the input needs no gradient
    dense(x).sum().backward()
    same_parts(split, cuts_of(split), dense, group.rank)
    for block in (split, dense):
        block.zero_grad()
        y = x.clone().requires_grad_()
        with torch.no_grad():
            block(y)
        block(y).sum().backward()
    same_parts(split, cuts_of(split), dense, group.rank)


def test_inputs_without_gradients_and_evaluation() -> None:
    run_ranks(without_gradients, 2)


def second_derivatives() -> None:
    dense, split, group = twins()
    found = []
    for block in (dense, split):
        x = random(2, 3, 8).requires_grad_()
        of_x, *of_weights = torch.autograd.grad(
            block(x).pow(2).sum(), [x, block.q.weight, block.up.weight], create_graph=True
        )
        penalty = sum(gradient.pow(2).sum() for gradient in of_weights)
        (of_x.pow(2).sum() + (penalty if block is dense else add_up(penalty, group))).backward()
        found.append((of_x.detach(), x.grad))
    for pair in zip(*found, strict=True):
        assert_close(*pair)
    same_parts(split, cuts_of(split), dense, group.rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_second_derivatives_are_those_of_dense_layers(ranks: int) -> None:
    run_ranks(second_derivatives, ranks)


def changed_in_place() -> None:
    """Backward of a linear layer needs its input, but for weights that are frozen."""
    dense, split, _ = twins()
    for block in (dense, split):
        block.requires_grad_(False)
        block.x = random(2, 3, 8).requires_grad_()
        x = block.x * 1
        q = block.q(x).sigmoid()
        x *= 2
        block.y = block.o(q * block.q(x))
        block.y.sum().backward()
    assert_close(split.y.detach(), dense.y.detach())
    assert_close(split.x.grad, dense.x.grad)


def test_a_tensor_changed_in_place_is_not_taken_for_the_one_that_came_in() -> None:
    run_ranks(changed_in_place, 2)


def training() -> None:
    group, dense, split = group_of_all(), Block(), Block()
    pairs = [(block, torch.optim.AdamW(block.parameters(), lr=0.1)) for block in (dense, split)]
    seen: list[str] = []
    split.q.register_forward_hook(lambda *_: seen.append("forward"))
    split.q.register_full_backward_hook(lambda *_: seen.append("backward"))
    split.q.weight.register_hook(lambda _: seen.append("gradient"))
    split.q.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    split(random(2, 3, 8).requires_grad_()).sum().backward()  # autograd has met the whole weights
    seen.clear()
    split.zero_grad()
    split_block(split, group)
    for step in range(3):
        for block, optimizer in pairs:
            optimizer.zero_grad()
            block(random(2, 3, 8, seed=step).requires_grad_()).pow(2).sum().backward()
            optimizer.step()
    assert (
        seen == ["forward", "gradient", "accumulated", "backward"] * 3
        or seen == [*("forward", "backward", "gradient", "accumulated")] * 3
    ), seen
    assert list(split.state_dict(keep_vars=True)) == list(dense.state_dict())
    twin = copy.deepcopy(split)
    twin(random(2, 3, 8).requires_grad_()).sum().backward()
    assert twin.q.group is split.q.group
    assert twin.q.weight is not split.q.weight
    cuts = cuts_of(split)
    for layer in (split.q, split.k, split.o, split.up, split.down):
        layer.to_dense()
    for (name, found), expected in zip(split.named_parameters(), dense.parameters(), strict=True):
        assert_close(found.detach(), expected.detach(), 1e-4)
        assert (found.grad is None) == (name in cuts)
    split(random(2, 3, 8).requires_grad_()).sum().backward()


def test_optimizers_hooks_names_and_copies_go_on_with_split_layers() -> None:
    run_ranks(training, 2)


def tied() -> None:
    group = group_of_all()
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        head.weight = embedding.weight
        models.append(nn.Sequential(embedding, nn.LayerNorm(8), head))
    dense, split = models
    VocabParallelEmbedding.from_dense(split[0], group)
    ColumnParallelLinear.from_dense(split[2], group, gather_output=True)
    assert split[0].weight is split[2].weight
    tokens = torch.tensor([[0, 10, 3], [7, 7, 1]])
    for model in models:
        model(tokens).pow(2).sum().backward()
    same_parts(split, cuts_of(split), dense, group.rank)
    split[0].to_dense()
    split[2].to_dense()
    assert split[0].weight is split[2].weight
    assert torch.equal(split[0].weight, dense[0].weight)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tied_weight_is_cut_and_joined_once(ranks: int) -> None:
    run_ranks(tied, ranks)


def wrong_tokens() -> None:
    group, embedding = group_of_all(), nn.Embedding(11, 8)
    VocabParallelEmbedding.from_dense(embedding, group)
    for token in (-1, 11):
        with pytest.raises(IndexError):
            embedding(torch.tensor([3, token]))


def test_a_token_outside_of_the_vocabulary_is_an_error_on_all_ranks() -> None:
    run_ranks(wrong_tokens, 2)


class Own(nn.Linear):
    """Computes in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Packed(Tensor):
    """Quantized, say."""


def test_layers_that_cannot_be_split_stay_as_they_are_and_say_why() -> None:
    group = TensorGroup(None, rank=1, size=4)
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: x
    packed = nn.Linear(8, 8)
    packed.weight = nn.Parameter(packed.weight.detach().as_subclass(Packed))
    split = nn.Linear(8, 8)
    ColumnParallelLinear.from_dense(split, group)
    for layer, reason in (
        (Own(8, 8), "Own has a forward of its own"),
        (replaced, "Linear has a forward of its own"),
        (computed, "its weight is no parameter of its own"),
        (packed, "its weight is a Packed"),
        (nn.Linear(8, 3), r"3 elements .* cannot be cut for 4 ranks"),
        (nn.Bilinear(8, 8, 8), "Bilinear is no linear layer"),
        (split, "it is split already"),
    ):
        kind, shapes = type(layer), [p.shape for p in layer.parameters()]
        with pytest.raises(CannotSplit, match=reason):
            ColumnParallelLinear.from_dense(layer, group)
        assert (type(layer), [p.shape for p in layer.parameters()]) == (kind, shapes)
    for embedding, reason in (
        (nn.Embedding(8, 8, max_norm=1.0), "max_norm"),
        (nn.Embedding(8, 8, sparse=True), "sparse"),
        (nn.Embedding(8, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(8, 8), "EmbeddingBag is no embedding"),
    ):
        with pytest.raises(CannotSplit, match=reason):
            VocabParallelEmbedding.from_dense(embedding, group)
    HiddenParallelEmbedding.from_dense(nn.Embedding(8, 8, scale_grad_by_freq=True), group)


def under_fake_tensors() -> None:
    """Ranks make their dry runs when they like."""
    group, split = group_of_all(), Block()
    split_block(split, group)
    embedding = nn.Embedding(11, 8)
    VocabParallelEmbedding.from_dense(embedding, group)
    if group.rank == 0:
        model = nn.Sequential(embedding, split)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = {
                name: torch.empty(parameter.shape, requires_grad=True) for name, parameter in model.named_parameters()
            }
            y = torch.func.functional_call(model, fakes, torch.zeros(2, 3, dtype=torch.long))
            y.sum().backward()
        assert y.shape == (2, 3, 8)
        assert all(fake.grad.shape == fake.shape for fake in fakes.values())
        with group.alone():
            model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        assert group.sent_bytes == 0
        assert group.recall(Entered) is None


def test_nothing_is_sent_in_a_dry_run_or_by_a_rank_that_measures_alone() -> None:
    run_ranks(under_fake_tensors, 2)


def in_two_parts() -> None:
    """As under a zero-bubble schedule."""
    for layer in (nn.Linear(8, 12), nn.Linear(8, 12, bias=False), Conv1D(12, 8)):
        group = group_of_all()
        ColumnParallelLinear.from_dense(layer, group)
        found = []
        for parts in (1, 2):
            layer.zero_grad()
            record = Import(0, None)
            x = random(2, 3, 8)
            y = layer(enter(x, record))
            towards = random(*y.shape)
            if parts == 1:
                torch.autograd.backward([y], [towards])
            else:
                with FlopCounterMode(display=False) as counted:
                    deferred = backward_of_imports([y], [towards], {record})
                assert counted.get_total_flops() == 2 * x.numel() * y.shape[-1], "it was computed and thrown away"
                assert layer.weight.grad is None, "it was computed although nobody waits for it"
                deferred.run()
            found.append([record.grad, *(parameter.grad for parameter in layer.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_gradients_of_weights_can_be_computed_later_than_the_sum_of_their_layers() -> None:
    run_ranks(in_two_parts, 2)
