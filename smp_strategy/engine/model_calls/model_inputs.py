"""Model inputs that need special treatment per microbatch: differentiable inputs and ``num_items_in_batch``.

Differentiable inputs, such as an image from a generator, embeddings or a prompt: to the engine a batch is data. So each
microbatch gets its part of such an input as a leaf tensor. Each stage computes the gradients of the uses that it runs;
their sum is the gradient of the input, with which backward continues in the script.

``num_items_in_batch``: models of Transformers take the number of labels in all batches of an optimizer step, so that
the loss of each batch can be a sum divided by that number, and the losses of several batches add up. But most models
take any keyword argument, pass this one on, and average over their own labels. The two kinds look alike from outside.

So a microbatch gets its share of the number, by its samples, and losses are averaged over the samples as usual. With
``S_i`` the sum over microbatch ``i``, ``w_i`` its share of the samples and ``N`` the number, the first kind gives
``sum(w_i * S_i / (w_i * N)) = S / N``, exactly where ``w_i`` is a power of two, and the second kind gives the result of
all other models.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.samples import Path, Samples, samples_in, visited
from smp_strategy.model.trace.pytree import flatten

__all__ = ["ModelInputs", "NAME", "with_share_of_items"]


@final
class ModelInputs:
    """Differentiable inputs of one call.

    Args:
        reads_alone: whether each rank of a tensor-parallel group reads samples of its own.

    Attributes:
        call: the arguments, detached.
        tensors: the differentiable inputs.

    Raises:
        UnsupportedError: such an input could not get its gradient.
    """

    def __init__(self, call: Any, samples: Samples, mesh: ProcessMesh, *, reads_alone: bool) -> None:
        self._mesh = mesh
        self._lists = samples.lists
        self._wholes: dict[Path, Tensor] = {}
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.tensors: list[Tensor] = []
        self.call = call
        wanted = {id(leaf) for leaf in flatten(call)[0] if _needs_gradient(leaf)} if torch.is_grad_enabled() else set()
        if not wanted:
            return
        self.call = visited(call, self._lists, self._without_history)
        if reads_alone or wanted != {id(tensor) for tensor in self.tensors}:
            where = "with `prescaled_batch=False`" if reads_alone else "inside of a list with one item per sample"
            raise UnsupportedError(
                f"The model is called with a tensor that needs a gradient {where}, which could not get one. Give it "
                "as a tensor of all samples, without that option, or `detach()` it if no gradient is wanted."
            )

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def _without_history(self, path: Path, leaf: Any) -> Any:
        if not _needs_gradient(leaf):
            return leaf
        whole: Tensor = leaf.detach()
        # Samples that share memory could not be told apart.
        self._wholes[path] = whole = whole.contiguous() if 0 in whole.stride() else whole
        self.tensors.append(leaf)
        return whole

    def begin(self, microbatch: Any) -> Any:
        """Copy ``microbatch``, a part of :attr:`call`, with leaf tensors that collect gradients."""
        if not self or not torch.is_grad_enabled():
            return microbatch

        def visit(path: Path, leaf: Any) -> Any:
            whole = self._wholes.get(path)
            if whole is None:
                return leaf
            start = leaf.detach().requires_grad_()
            if leaf.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():  # and not that of a dry run
                self._parts.append((whole, leaf, start))
            return start.clone()  # code of the model may change it in place

        return visited(microbatch, self._lists, visit)

    def gradients(self) -> list[Tensor]:
        """Gradients of :attr:`tensors`, after a backward. Collective over the stages."""
        totals = {id(whole): torch.zeros_like(whole) for whole in self._wholes.values()}
        for whole, part, start in self._parts:
            if start.grad is not None:
                _rows(totals[id(whole)], whole, part).add_(start.grad)
                start.grad = None
        found = [totals[id(whole)] for whole in self._wholes.values()]
        if self._mesh.pp > 1:
            for total in found:
                collectives.all_reduce(total, group=self._mesh.pp_group, doing="gradients of inputs").wait()
        return found


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _rows(total: Tensor, whole: Tensor, part: Tensor) -> Tensor:
    """Rows of ``total``, which has the layout of ``whole``, that belong to ``part``."""
    if part.shape == whole.shape:
        return total
    start = (part.storage_offset() - whole.storage_offset()) // whole.stride(0)
    return total[start : start + len(part)]


NAME = "num_items_in_batch"


def with_share_of_items(kwargs: Mapping[str, Any], microbatch: Any, samples: Samples) -> Mapping[str, Any]:
    """Scale the number of items in ``kwargs``, if given, to the share of ``microbatch``.

    Args:
        microbatch: arguments of the model, a part of the samples of one or more ranks.
        samples: samples of the call on this rank.
    """
    items = kwargs.get(NAME)
    if items is None:
        return kwargs
    mine, whole = samples_in(microbatch, samples), samples.number
    if not mine or not whole or mine == whole:
        return kwargs
    return {**kwargs, NAME: items * (mine / whole)}
