"""Cross-entropy over logits that are cut along the classes, against the whole one."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.sharded_tensor import cross_entropy as loss
from smp_strategy.testing import run_ranks

TOKENS = 7
IGNORED = (2, 5)


def _lengths() -> list[int]:
    """Parts of different lengths; one of them has one class only."""
    return [5, 1, 4, 3][: dist.get_world_size()]


def _problem(ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    num_classes = sum(_lengths())
    logits = (4 * torch.randn(TOKENS, num_classes, generator=generator)).to(dtype)
    target = torch.randint(3, num_classes, (TOKENS,), generator=generator)
    target[list(IGNORED)] = ignore_index
    return logits, target


def _both(dtype: torch.dtype, weight: Tensor | None = None, ignore_index: int = -100, **options: Any) -> list[Tensor]:
    """Loss and gradient of my logits, then the same of whole logits in at least float32."""
    group, lengths = TensorGroup(dist.group.WORLD), _lengths()
    logits, target = _problem(ignore_index, dtype)
    options = {**options, "weight": weight, "ignore_index": ignore_index}
    factors = torch.arange(1.0, TOKENS + 1)
    part = logits.split(lengths, -1)[group.rank].clone().requires_grad_()
    found = loss.cross_entropy(part, target, group, lengths, **options)
    (found * factors[: found.numel()].view(found.shape)).sum().backward()
    whole = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    wanted = functional.cross_entropy(whole, target, **options)
    (wanted * factors[: wanted.numel()].view(wanted.shape)).sum().backward()
    assert found.dtype == part.grad.dtype == dtype
    return [found.detach(), part.grad, wanted.detach(), whole.grad.split(lengths, -1)[group.rank]]


def _differences(dtype: torch.dtype, tolerance: float) -> list[str]:
    wrong = []
    for reduction, smoothing, ignore_index, weighted in itertools.product(
        ("none", "mean", "sum"), (0.0, 0.3), (-100, 2), (False, True)
    ):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        weight = torch.linspace(0, 2, sum(_lengths()), dtype=torch.promote_types(dtype, torch.float32))
        found, gradient, wanted, whole = _both(dtype, weight if weighted else None, ignore_index, **options)
        for one, other in ((found, wanted), (gradient, whole)):
            if not torch.allclose(one.to(other.dtype), other, rtol=tolerance, atol=tolerance / 10):
                wrong.append(f"{options}, ignoring {ignore_index}, {weighted=}: {one}, not {other}")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 2**-7)]
)
def test_loss_and_gradient_are_those_of_whole_logits(size: int, dtype: torch.dtype, tolerance: float) -> None:
    assert run_ranks(_differences, size, dtype, tolerance) == [[]] * size


def _nothing_counts(reduction: str) -> tuple[float, bool]:
    group, lengths = TensorGroup(dist.group.WORLD), _lengths()
    part = torch.randn(TOKENS, lengths[group.rank], requires_grad=True)
    found = loss.cross_entropy(part, torch.full((TOKENS,), -100), group, lengths, reduction=reduction)
    found.backward()
    return found.item(), bool((part.grad == 0).all())


def test_where_all_targets_are_ignored_the_mean_is_nan_and_gradients_are_zero() -> None:
    for found, is_zero in run_ranks(_nothing_counts, 2, "mean"):
        assert found != found
        assert is_zero
    assert run_ranks(_nothing_counts, 2, "sum") == [(0.0, True)] * 2


def _all_ranks_have_the_same_bits() -> Tensor:
    found, *_ = _both(torch.float32, reduction="none", label_smoothing=0.1)
    return found


def test_the_loss_is_the_same_to_the_bit_on_all_ranks() -> None:
    first, *others = run_ranks(_all_ranks_have_the_same_bits, 4)
    assert all(torch.equal(first, other) for other in others)


def _sent(num_classes: int, label_smoothing: float) -> int:
    group, lengths = TensorGroup(dist.group.WORLD), [num_classes // 2] * 2
    part = torch.randn(TOKENS, lengths[0], requires_grad=True)
    target = torch.zeros(TOKENS, dtype=torch.long)
    loss.cross_entropy(part, target, group, lengths, label_smoothing=label_smoothing).backward()
    return group.sent_bytes


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 2), (0.1, 3)])
@pytest.mark.parametrize("num_classes", [8, 8000])
def test_two_numbers_of_each_token_are_sent_whatever_the_number_of_classes(
    smoothing: float, numbers: int, num_classes: int
) -> None:
    assert run_ranks(_sent, 2, num_classes, smoothing) == [numbers * TOKENS * 4] * 2


def _kept_bytes() -> tuple[int, int]:
    group, lengths = TensorGroup(dist.group.WORLD), [500, 500]
    part = torch.randn(TOKENS, 500, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss.cross_entropy(part, torch.zeros(TOKENS, dtype=torch.long), group, lengths)
    return sum(kept.values()), part.nbytes


def test_nothing_of_the_size_of_the_logits_is_kept_but_themselves() -> None:
    for kept, of_logits in run_ranks(_kept_bytes, 2):
        assert of_logits <= kept < 1.1 * of_logits


def _in_pieces() -> bool:
    before = _both(torch.float32)
    loss._AT_A_TIME = 2 * max(_lengths()) + 1  # two tokens at a time, and one at the end
    after = _both(torch.float32)
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_how_many_tokens_are_worked_on_at_a_time_changes_nothing() -> None:
    assert all(run_ranks(_in_pieces, 2))


def _strange_target(target: int) -> None:
    group, lengths = TensorGroup(dist.group.WORLD), _lengths()
    loss.cross_entropy(torch.randn(1, lengths[group.rank]), torch.tensor([target]), group, lengths)


@pytest.mark.parametrize("target", [6, -1])
def test_a_target_that_is_no_class_is_an_error(target: int) -> None:
    with pytest.raises(RuntimeError, match="A target of cross-entropy is none of the 6 classes"):
        run_ranks(_strange_target, 2, target)


def _largest() -> bool:
    group, lengths = TensorGroup(dist.group.WORLD), _lengths()
    generator = torch.Generator().manual_seed(5)
    whole = torch.randint(4, (200, sum(lengths)), generator=generator).float()  # many are equal
    whole[3, 4], whole[4], whole[5, 1:] = torch.nan, -torch.inf, torch.nan
    found = loss.argmax(whole.split(lengths, -1)[group.rank].view(2, 100, -1), group, lengths)
    return torch.equal(found, whole.view(2, 100, -1).argmax(-1))


@pytest.mark.parametrize("size", [2, 4])
def test_argmax_is_that_of_the_whole_even_among_equals(size: int) -> None:
    assert all(run_ranks(_largest, size))
