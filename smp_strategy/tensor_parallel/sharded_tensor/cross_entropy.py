"""Vocabulary-parallel cross-entropy and argmax: logits whose classes are split are never gathered.

The logits are by far the largest activation of a language model. Per token the ranks exchange the log of the sum of
exponentials over their classes, and the logit of the target, which one of them has. Both travel in one message, whose
size is that of the tokens, whatever the number of classes. Backward sends nothing::

    loss     = log(sum over ranks of exp(their logsumexp)) - logit of the target
    gradient = exp(logit - logsumexp) - (1 at the target)      for my classes

Only the logits themselves are saved for backward, in their original dtype. Both passes compute in float32 for some
tokens at a time, so there is never a second tensor of the logits' size but their gradient.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.distributed.torch_private import assert_later

__all__ = ["argmax", "cross_entropy"]

# Logits per block: enough to keep a device busy, little beside all of them.
_AT_A_TIME = 1 << 24


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: TensorGroup,
    lengths: Sequence[int],
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """:func:`torch.nn.functional.cross_entropy` for logits that are cut along the classes.

    Args:
        logits: Logits of this rank's classes: ``[..., classes]``; unlike in torch they are the last dim.
        target: Class indices: ``[...]``.
        group: Ranks that have the classes.
        lengths: Numbers of classes of the ranks.
        weight, ignore_index, reduction, label_smoothing: As in torch; ``weight`` has all classes.

    Raises:
        ValueError: Unknown ``reduction``.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if torch.is_autocast_enabled(logits.device.type):
        # As in torch: float32 under autocast. That is exact here without a copy of the logits.
        dtype = torch.promote_types(logits.dtype, torch.float32)
    else:
        dtype = logits.dtype
    target = target.reshape(-1).long()
    kept = target != ignore_index
    _check_targets(target, kept, sum(lengths))
    target = target.where(kept, 0)
    weights = None if weight is None else weight.to(_precise(logits.dtype))
    plan = _Plan(group, lengths, weights, label_smoothing)
    rows = logits.reshape(len(target), logits.shape[-1])
    losses: Tensor = _CrossEntropy.apply(rows, target, kept, plan)  # type: ignore[no-untyped-call]
    if reduction == "none":
        result = losses.view(logits.shape[:-1])
    elif reduction == "sum":
        result = losses.sum()
    else:
        result = losses.sum() / (kept.sum() if weights is None else (weights[target] * kept).sum())
    return result.to(dtype)


def argmax(part: Tensor, group: TensorGroup, lengths: Sequence[int]) -> Tensor:
    """Index of the largest element over the last dim, which is cut; the first one of several."""
    if part.shape[-1]:
        values, indices = part.detach().max(-1)
    else:
        values, indices = (part.new_full(part.shape[:-1], fill) for fill in (-torch.inf, 0))
    # One message for both: doubles represent every index, and every value of the allowed dtypes.
    mine = torch.stack((values.double(), indices.double() + sum(lengths[: group.rank])))
    found = group.gather(mine.unsqueeze(0), 0, [1] * group.size)
    best = found[:, 0].argmax(0, keepdim=True)
    return found[:, 1].gather(0, best).squeeze(0).long()


class _Plan(NamedTuple):
    """Values common to all tokens."""

    group: TensorGroup
    lengths: Sequence[int]
    weight: Tensor | None
    smoothing: float

    @property
    def start(self) -> int:
        """Index of this rank's first class."""
        return sum(self.lengths[: self.group.rank])

    @property
    def total_weight(self) -> Tensor | float:
        """Sum of the weights of all classes."""
        return float(sum(self.lengths)) if self.weight is None else self.weight.sum()

    @property
    def my_weight(self) -> Tensor | None:
        """Weights of this rank's classes."""
        return None if self.weight is None else self.weight[self.start :][: self.lengths[self.group.rank]]

    def of_targets(self, target: Tensor) -> Tensor | float:
        """Weight of each token's own loss."""
        return (1 - self.smoothing) * (1.0 if self.weight is None else self.weight[target])

    def mine(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as indices of this rank's classes, and a mask of those that are."""
        index = target - self.start
        is_mine = (index >= 0) & (index < self.lengths[self.group.rank])
        return index.where(is_mine, 0), is_mine


class _CrossEntropy(torch.autograd.Function):
    """Loss of each token, ``[tokens, my classes], [tokens] -> [tokens]``; zero for tokens that are ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, kept: Tensor, plan: _Plan) -> Tensor:
        found = logits.new_zeros((3 if plan.smoothing else 2, len(logits)), dtype=_precise(logits.dtype))
        for some in _some_tokens(logits):
            found[:, some] = _of_my_classes(logits[some].to(found.dtype), target[some], plan)
        whole = plan.group.gather(found.unsqueeze(0), 0, [1] * plan.group.size)
        log_sum = whole[:, 0].logsumexp(0)
        losses = plan.of_targets(target) * (log_sum - whole[:, 1].sum(0))
        if plan.smoothing:
            weighted = plan.total_weight * log_sum - whole[:, 2].sum(0)
            losses = losses + plan.smoothing / sum(plan.lengths) * weighted
        ctx.plan = plan
        ctx.save_for_backward(logits, target, kept, log_sum)
        return losses.where(kept, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, kept, log_sum = ctx.saved_tensors
        # If all tokens are ignored, a mean divides by zero.
        gradient = gradients[0].where(kept, 0)
        result = torch.empty_like(logits)
        for some in _some_tokens(logits):
            result[some] = _gradient(logits[some] - log_sum[some, None], target[some], gradient[some], ctx.plan)
        return result, None, None, None


def _of_my_classes(logits: Tensor, target: Tensor, plan: _Plan) -> Tensor:
    """Message to other ranks, per token: logsumexp, logit of the target, sum over classes."""
    index, is_mine = plan.mine(target)
    if logits.shape[-1]:
        of_target = logits.gather(-1, index[:, None]).squeeze(-1).where(is_mine, 0)
    else:
        of_target = logits.new_zeros(len(logits))
    found = [logits.logsumexp(-1), of_target]
    if plan.smoothing:
        found.append(logits.sum(-1) if plan.my_weight is None else logits @ plan.my_weight)
    return torch.stack(found)


def _gradient(log_softmax: Tensor, target: Tensor, gradient: Tensor, plan: _Plan) -> Tensor:
    """Gradient of some tokens' logits; overwrites ``log_softmax``."""
    each = plan.smoothing / sum(plan.lengths)
    own = gradient * plan.of_targets(target)
    result = log_softmax.exp_().mul_((own + gradient * (each * plan.total_weight))[:, None])
    if plan.smoothing:
        result -= (gradient * each)[:, None] * (1.0 if plan.my_weight is None else plan.my_weight)
    if result.shape[-1]:
        index, is_mine = plan.mine(target)
        result.scatter_add_(-1, index[:, None], -own.where(is_mine, 0)[:, None])
    return result


def _some_tokens(logits: Tensor) -> Iterator[slice]:
    number = max(_AT_A_TIME // max(logits.shape[-1], 1), 1)
    return (slice(start, start + number) for start in range(0, len(logits), number))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_targets(target: Tensor, kept: Tensor, num_classes: int) -> None:
    # A target outside of all ranks' classes would count as a logit of zero.
    is_class = ((target >= 0) & (target < num_classes)) | ~kept
    assert_later(is_class.all(), f"A target of cross-entropy is none of the {num_classes} classes.")
