"""Operations on tensors of which each rank has a part, against the same on whole tensors."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor
from smp_strategy.testing import run_ranks

SIZE = (2, 8, 6)
LENGTHS = {2: {0: [2, 0], 1: [5, 3], 2: [4, 2]}, 4: {0: [0, 1, 1, 0], 1: [3, 2, 2, 1], 2: [2, 2, 1, 1]}}
W = torch.linspace(0.5, 1.5, 6)
INDEX = torch.tensor([5, 0, 3])
MASK = torch.tensor([[True, False] * 4, [False, False, True, True] * 2])


def _in_place(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    x = x * 1
    change(x)
    return x


def _changed(x: Tensor, w: Tensor) -> Tensor:
    x.add_(w)
    x.mul_(w)
    return x


def _set(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


# Each gets x of SIZE and w, 6 numbers, both with gradients. Behind it: along which dims of x its parts stay parts.
ANY = (0, 1, 2)
TABLE: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, ...]]] = {
    "arithmetic": (lambda x, w: (2 - x * 3 + x / 2) ** 2 - -x, ANY),
    "with a vector": (lambda x, w: x * w + w, ANY),
    "a vector first": (lambda x, w: w * x, ANY),
    "with a whole one": (lambda x, w: x + w.expand(2, 8, 6) * x.detach(), ANY),
    "with a scalar that is learned": (lambda x, w: x * w.sum(), ANY),
    "with sums over each dim": (lambda x, w: x / (1 + x.square().mean(-1, keepdim=True).sqrt()), ANY),
    "with itself in another order": (lambda x, w: x + x.flip(1), ANY),
    "activations": (lambda x, w: F.gelu(x) + F.silu(x) + torch.tanh(x) + x.sigmoid() + F.relu(x), ANY),
    "comparisons": (lambda x, w: (x > 0) * x + torch.where(x < w, x, w), ANY),
    "masks": (lambda x, w: x.masked_fill(MASK[..., None], 0.5), ANY),
    "clamps": (lambda x, w: x.clamp(-0.5, 0.5) + torch.maximum(x, w), ANY),
    "dtypes": (lambda x, w: (x.double() * w.double()).to(torch.float32).float(), ANY),
    "like another": (lambda x, w: x.to(w).type_as(w), ANY),
    "layer norm": (lambda x, w: F.layer_norm(x, (6,), w, w), (0, 1)),
    "layer norm of two dims": (lambda x, w: F.layer_norm(x, (8, 6), w.expand(8, 6)), (0,)),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w), (0, 1)),
    "linear": (lambda x, w: F.linear(x, w.expand(4, 6), w[:4]), (0, 1)),
    "matrices": (lambda x, w: x @ w.expand(4, 6).t() + torch.matmul(x, w)[..., None], (0, 1)),
    "batches of matrices": (lambda x, w: x @ x.transpose(1, 2), ()),
    "softmax": (lambda x, w: F.softmax(x, -1) + x.log_softmax(2), (0, 1)),
    "softmax over the middle": (lambda x, w: x.softmax(1).cumsum(dim=-2), (0, 2)),
    "sums": (lambda x, w: x.sum(1) + x.mean(dim=1) + x.amax(1) + x.logsumexp(1), (0, 2)),
    "spread": (lambda x, w: x.var(-1, True, True) + x.std(dim=-1, keepdim=True), (1,)),
    "sums over two": (lambda x, w: x.sum((0, 2), keepdim=True).mean((-3, -1)), (1,)),
    "maxima": (lambda x, w: x.max(1).values + x.min(dim=1)[0] + x.topk(2, 1).values[:, 0] + x.sort(1)[0][:, 3], (0, 2)),
    "total": (lambda x, w: x.sum() * x.mean(), ()),
    "norm": (lambda x, w: x.norm() * F.normalize(x, dim=-1), ()),
    "view": (lambda x, w: x.view(4, 4, 6).view(16, 6), (0, 2)),
    "flatten": (lambda x, w: x.reshape(-1, 6) + x.flatten(0, 1) + x.view(-1, x.size(-1)), (0, 2)),
    "flatten the end": (lambda x, w: x.flatten(1), (0, 1)),
    "unflatten": (lambda x, w: x.unflatten(0, (1, 2)), (1, 2)),
    "transpose": (lambda x, w: x.transpose(0, 1) + x.permute(1, 0, 2) + x.mT.permute((2, 0, 1)), ANY),
    "contiguous": (lambda x, w: x.transpose(1, 2).contiguous().view(2, 6, 2, 4), (0, 2)),
    "unsqueeze": (lambda x, w: x.unsqueeze(1).squeeze(1) + x[:, None].squeeze() + x[None, ..., None].squeeze(), ANY),
    "expand": (lambda x, w: x.unsqueeze(0).expand(3, -1, 8, 6) + x.expand_as(x), ANY),
    "slices": (lambda x, w: x[:, 1:7][..., :4], (0,)),
    "a step back": (lambda x, w: x[..., :-1, :].contiguous(), (0, 2)),
    "the last one": (lambda x, w: x[:, -1] + x.select(1, 0) + x.narrow(1, 3, 1)[:, 0], (0, 2)),
    "ellipsis": (lambda x, w: x[..., 2], (0, 1)),
    "tensors as indices": (lambda x, w: x[:, INDEX] + x.index_select(1, INDEX), (0, 2)),
    "two tensors": (lambda x, w: x[torch.tensor([0, 1, 1]), INDEX], (2,)),
    "two tensors apart": (lambda x, w: x[torch.tensor([0, 1, 1]), :, INDEX], ()),
    "a number and a tensor": (lambda x, w: x[1, INDEX], (2,)),
    "a tensor behind": (lambda x, w: x[:, :, INDEX], (0, 1)),
    "a mask": (lambda x, w: x[MASK], (2,)),
    "pieces": (lambda x, w: x.split(3, 1)[1] + x.chunk(2, dim=1)[0][:, :3] + torch.stack(x.unbind(1)[:3], 1), (0, 2)),
    "cat": (lambda x, w: torch.cat([x, w.expand(2, 1, 6), x], 1), (0, 2)),
    "stack": (lambda x, w: torch.stack((x, x * 2), dim=-1).sum(-1), ANY),
    "new ones": (lambda x, w: x + torch.zeros_like(x) + torch.ones_like(x) + x.new_ones(6), ANY),
    "changed in place": (lambda x, w: _in_place(x, lambda y: y.add_(w).mul_(2).clamp_(-1, 1)), ANY),
    "an operator in place": (lambda x, w: _in_place(x, lambda y: y.__iadd__(x).__imul__(w)), ANY),
    "a part set": (lambda x, w: _in_place(x, lambda y: _set(y, (0, slice(1, 3)), w)), ANY),
    "a function in place": (lambda x, w: F.relu(x * w, inplace=True) + F.dropout(x, 0.5, training=False), ANY),
    "a view in place": (lambda x, w: _in_place(x, lambda y: y.transpose(0, 1).mul_(w)), ANY),
    "another in place": (lambda x, w: _in_place(w.expand(2, 8, 6).clone(), lambda y: y.mul_(x)), ()),
    "something rare": (lambda x, w: torch.einsum("bsh,h->bs", x, w) + torch.linalg.vector_norm(x, dim=-1), ()),
    "checkpoint": (lambda x, w: checkpoint(lambda y: F.gelu(y * w) * y, x, use_reentrant=False), ANY),
    "reentrant checkpoint": (lambda x, w: checkpoint(lambda y: F.gelu(y * 2) * y, x, use_reentrant=True), ANY),
    "a function of the user's": (lambda x, w: _Square.apply(x * 2) * w, ANY),
    "such a function of what was changed": (lambda x, w: _Square.apply(_in_place(x, lambda y: y.mul_(w))), ANY),
    "and changed by a view": (lambda x, w: _Square.apply(_in_place(x, lambda y: y.transpose(0, 1).mul_(w))), ANY),
    "its result changed": (lambda x, w: _changed(_Square.apply(x), w) + x, ANY),
    "one of two": (lambda x, w: _Product.apply(x, w.expand(2, 8, 6)), ANY),
}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        return y * gradients[0], x * gradients[0]


def _near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and found.dtype == wanted.dtype and torch.allclose(found, wanted, atol=2e-5)


def _run(operation: Callable[..., Any], split: Callable[[Tensor], Tensor]) -> tuple[Any, list[Tensor]]:
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    w = W.clone().requires_grad_()
    result = operation(split(x * 1), w)
    whole = result.whole() if isinstance(result, SplitTensor) else result
    assert result.shape == whole.shape
    factors = torch.linspace(-1, 1, whole.numel()).view(whole.shape)
    if whole.requires_grad:
        (whole * factors).sum().backward()
    return result, [whole.detach(), x.grad, torch.zeros(6) if w.grad is None else w.grad]


def _wrong(dim: int) -> list[str]:
    group = TensorGroup(dist.group.WORLD)
    lengths = LENGTHS[group.size][dim]
    wrong = []
    for name, (operation, stays) in TABLE.items():
        result, found = _run(operation, lambda x: SplitTensor.from_whole(x, group, dim, lengths))
        _, wanted = _run(operation, lambda x: x)
        names = ("value", "gradient", "gradient of w")
        wrong += [
            f"{name}: {what}" for what, one, other in zip(names, found, wanted, strict=True) if not _near(one, other)
        ]
        if isinstance(result, SplitTensor) != (dim in stays):
            wrong.append(f"{name}: is{' not' * (dim in stays)} split")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_values_and_gradients_are_those_of_whole_tensors_and_parts_stay_parts(size: int, dim: int) -> None:
    for wrong in run_ranks(_wrong, size, dim):
        assert wrong == []


def _unsplit_reads() -> list[Any]:
    group = TensorGroup(dist.group.WORLD)
    whole = torch.arange(24.0).view(2, 12)
    split = SplitTensor.from_whole(whole, group, 1, [7, 5])
    saved = io.BytesIO()
    torch.save({"logits": split}, saved)
    saved.seek(0)
    return [
        repr(split) == repr(whole),
        f"{split.sum():.1f}" == "276.0",
        split[1, 3].item() == 15.0,
        split.tolist() == whole.tolist(),
        (split.numpy() == whole.numpy()).all().item(),
        torch.equal(split, whole),
        torch.allclose(whole, split),
        bool((split == whole).all()),
        len(split) == 2,
        [row.tolist() for row in split] == whole.tolist(),
        torch.equal(pickle.loads(pickle.dumps(split)), whole),
        torch.equal(torch.load(saved)["logits"], whole),
        torch.equal(copy.copy(split), whole),
        isinstance(copy.deepcopy(split), SplitTensor) and torch.equal(copy.deepcopy(split), whole),
        torch.equal(torch.cat([split.detach().cpu(), split.argmax(-1, keepdim=True)], 1)[:, :12], whole),
        torch.equal(torch.stack([split, whole])[1], whole),
        split.shape == whole.shape and split.stride() == whole.stride() and split.is_contiguous(),
        split.T.stride() == whole.T.stride() and not split.T.is_contiguous(),
        torch.equal(split.topk(3).indices, whole.topk(3).indices),
        torch.equal(torch.tensor(split.tolist()), whole),
        isinstance(split, Tensor) and not split.requires_grad and split.grad is None and split.is_leaf,
    ]


def test_what_asks_for_values_or_metadata_gets_those_of_the_whole() -> None:
    for found in run_ranks(_unsplit_reads, 2):
        assert [number for number, is_right in enumerate(found) if not is_right] == []


def _graph() -> list[tuple[list[Any], list[Any]]]:
    group = TensorGroup(dist.group.WORLD)
    found = []
    for is_split in (True, False):
        w = torch.arange(8.0, requires_grad=True)
        seen: list[Tensor] = []
        x = SplitTensor.from_whole(w * 2, group, 0, [5, 3]) if is_split else w * 2
        x.register_hook(lambda gradient, seen=seen: seen.append(gradient) or gradient * 10)
        x.retain_grad()
        start = x.detach().requires_grad_()
        (start**2).sum().backward()
        (inner,) = torch.autograd.grad((x * x).sum(), x, retain_graph=True)
        (x * torch.arange(8.0)).backward(torch.ones(8))
        parts = torch.autograd.grad(x.detach() * w, w, torch.arange(8.0))[0]
        asked = [start.is_leaf, start.grad_fn is None, x.requires_grad, x.is_leaf, x.grad_fn is None, x.retains_grad]
        found.append([*asked, *(each.tolist() for each in (start.grad, inner, *seen, x.grad, w.grad, parts))])
    return list(zip(*found, strict=True))


def test_gradients_are_asked_for_and_hooked_as_those_of_any_tensor() -> None:
    for found in run_ranks(_graph, 2):
        assert all(one == other for one, other in found), found


class _Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x)) + x


def _hooked() -> list[Tensor]:
    group = TensorGroup(dist.group.WORLD)
    found = []
    for is_split in (True, False):
        torch.manual_seed(0)
        module, seen = _Watched(), []
        module.register_full_backward_hook(lambda _, inputs, outputs, seen=seen: seen.extend((*inputs, *outputs)))
        x = torch.randn(2, 5, 6, requires_grad=True)
        y = module(SplitTensor.from_whole(x * 1, group, 1) if is_split else x * 1)
        (y * torch.arange(5.0)[:, None]).sum().backward()
        found.append([*seen, x.grad, *(parameter.grad for parameter in module.parameters())])
    return [(one - other).abs().max().item() for one, other in zip(*found, strict=True)]


def test_hooks_of_modules_see_split_gradients_of_the_right_values() -> None:
    for differences in run_ranks(_hooked, 2):
        assert len(differences) == 5
        assert max(differences) < 1e-5


def _dropped() -> tuple[Tensor, Tensor, bool]:
    group = TensorGroup(dist.group.WORLD)
    torch.manual_seed(4)
    split = SplitTensor.from_whole(torch.ones(2, 50), group, 1, [30, 20])
    dropped = F.dropout(split, 0.5)
    after = torch.rand(3)
    return dropped.whole(), after, torch.equal(dropped.part[:, :20], F.dropout(split, 0.5).part[:, :20])


def test_dropout_differs_between_parts_and_leaves_all_ranks_alike() -> None:
    (first, after, is_repeated), (second, after_too, _) = run_ranks(_dropped, 2)
    assert torch.equal(first, second)
    assert torch.equal(after, after_too)
    assert not torch.equal(first[:, :20], first[:, 30:])
    assert 0.3 < (first == 0).float().mean() < 0.7
    assert not is_repeated


def _refused(what: str) -> None:
    split = SplitTensor.from_whole(torch.ones(2, 4), TensorGroup(dist.group.WORLD), 1)
    if what == "size":
        split.unsqueeze_(0)
    elif what == "collective":
        dist.all_reduce(split)
    elif what == "collective past Python":
        dist.group.WORLD.allreduce([split])
    elif what == "list":
        torch._foreach_add_([split], 1)
    elif what == "data":
        split.data = torch.ones(2, 4)
    else:
        torch.add(split, 1, out=split)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", r"`unsqueeze_` would change the size of a split tensor\. Use what returns"),
        ("out", r"`add\(\.\.\., out=\.\.\.\)` into a split tensor\. Use what the operation"),
        ("collective", r"`all_reduce` of a split tensor\. Say what is meant: `x\.whole\(\)`, or"),
        ("collective past Python", r"`allreduce_` of a split tensor\. Say what is meant"),
        ("list", r"`_foreach_add_` would change split tensors in a list\. Put them together first"),
        ("data", "no setter"),
    ],
)
def test_changes_that_no_part_can_make_alone_are_refused(what: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_ranks(_refused, 2, what)


def _bytes() -> list[int]:
    group = TensorGroup(dist.group.WORLD)
    x = torch.randn(2, 50, 6, requires_grad=True)
    split = SplitTensor.from_part(x, group, 1, [50, 50])
    sent = []
    y = F.gelu(F.layer_norm(split + split.transpose(0, 1).transpose(0, 1), (6,))).view(100 * 2, 6).view(2, 100, 6)
    sent.append(group.sent_bytes)
    y = F.gelu(F.layer_norm(split, (6,)))[..., :3] * 2
    sent.append(group.sent_bytes)
    y.sum().backward()
    return [*sent, group.sent_bytes]


def test_nothing_is_sent_where_each_part_goes_by_itself() -> None:
    for first, second, third in run_ranks(_bytes, 2):
        assert first == second == 2 * 50 * 6 * 4  # one flattening across parts put them together
        assert third == second + 4
