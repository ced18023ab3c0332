"""Gradients with respect to what the model is called with: an image that a generator has made, embeddings, a prompt.

To the engine a batch is data. So each microbatch gets its part of such an input as a tensor of its own, where the
gradient ends. A stage computes the gradients of those uses that it runs; together they are the gradient of the input,
with which backward goes on in the script.

``num_items_in_batch``, for a microbatch.

Models of Transformers take the number of labels in all that an optimizer's step sees, so that the loss of each batch
can be a sum over it divided by that number, and the losses of several batches add up. But most of them take any keyword
argument, pass this one on, and average over what they are given. From outside it cannot be told which they do.

So a microbatch gets its share of the number, by its samples, and losses are averaged over the samples as ever. With
``S_i`` the sum over microbatch ``i``, ``w_i`` its part of the samples and ``N`` the number, that is for the first kind
``sum(w_i * S_i / (w_i * N)) = S / N``, exactly where ``w_i`` is a power of two, and for the second kind what it is for
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
    """Those of one call through which gradients flow on.

    Args:
        call: arguments of the model.
        samples: of it.
        mesh: where the ranks stand.
        reads_alone: whether each of the ranks that split layers reads samples of its own.

    Attributes:
        call: the same without a history.
        tensors: through which gradients flow.

    Raises:
        UnsupportedError: they could not be told what their gradients are.
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
        """``microbatch`` of :attr:`call`, or a copy of it, with tensors for which there will be gradients."""
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
        """Of :attr:`tensors`, after a backward. Collective over the stages."""
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
    """Those of ``total``, which looks like ``whole``, that are about ``part``."""
    if part.shape == whole.shape:
        return total
    start = (part.storage_offset() - whole.storage_offset()) // whole.stride(0)
    return total[start : start + len(part)]


NAME = "num_items_in_batch"


def with_share_of_items(kwargs: Mapping[str, Any], microbatch: Any, samples: Samples) -> Mapping[str, Any]:
    """``kwargs`` of a call for ``microbatch``, with its share of the number of items, if they name one.

    Args:
        kwargs: keyword arguments of the model.
        microbatch: what it is called with, cut out of what one or more ranks have read.
        samples: of the call, with what this rank has read.
    """
    items = kwargs.get(NAME)
    if items is None:
        return kwargs
    mine, whole = samples_in(microbatch, samples), samples.number
    if not mine or not whole or mine == whole:
        return kwargs
    return {**kwargs, NAME: items * (mine / whole)}
