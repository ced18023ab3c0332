"""Broadcast of a step's results: placed tensors become real tensors on all stages.

The stage that made a tensor sends it to all others, one message per dtype and device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.pytree import flatten, is_opened_placed
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["begin_to_make_real", "up_to_date"]


def up_to_date(tree: Any) -> Any:
    """``tree``, the result of a step, with all changes of its tensors' memory; called while the program still runs."""
    for leaf in flatten(tree)[0]:
        if isinstance(leaf, PlacedTensor) and not leaf.program.closed:
            leaf.program.check_current(leaf)
    return tree


def begin_to_make_real(tree: Any, transport: Transport | None, stage: int, num_stages: int) -> Callable[[], Any]:
    """Begin to broadcast the values of placed tensors in ``tree``, the same on all stages; collective. Returns a
    function that waits, and returns ``tree`` with real, detached tensors.
    """
    leaves, structure = flatten(
        tree, lambda nest: type(nest) is torch.Size, is_opened_placed
    )  # which would become a tuple
    placed = [leaf for leaf in leaves if isinstance(leaf, PlacedTensor)]
    for tensor in placed:
        if not tensor.program.closed:
            tensor.program.check_current(tensor)
    begun: list[tuple[list[int], Callable[[], list[Tensor]]]] = []
    for home in range(num_stages):
        mine = list({id(tensor): tensor for tensor in placed if tensor.program.lives_on(tensor) == home}.values())
        if not mine:
            continue
        values = [None if each.origin is None or home != stage else each.origin[1] for each in mine]
        specs = [each.spec for each in mine]
        begun.append(([id(tensor) for tensor in mine], _begin_to_share(values, specs, home, transport)))

    def wait() -> Any:
        real = {key: value for keys, shared in begun for key, value in zip(keys, shared(), strict=True)}
        return pytree.tree_unflatten([_real_of(leaf, real) for leaf in leaves], structure)

    return wait


def _begin_to_share(
    values: Sequence[Tensor | None], specs: Sequence[TensorSpec], home: int, transport: Transport | None
) -> Callable[[], list[Tensor]]:
    """Begin to broadcast the tensors of stage ``home``, which passes ``values``; returns a function that waits."""
    if transport is None:
        here = [value.detach() for value in values if value is not None]
        return lambda: here
    begun: list[tuple[list[int], Callable[[], Tensor]]] = []
    for kind in dict.fromkeys((spec.dtype, spec.device) for spec in specs):
        members = [index for index, spec in enumerate(specs) if (spec.dtype, spec.device) == kind]
        flat = [value.detach().reshape(-1) for value in (values[index] for index in members) if value is not None]
        spec = TensorSpec((sum(specs[index].numel for index in members),), (1,), *kind, False)
        begun.append((members, _begin_to_share_flat(flat, spec, home, transport)))

    def wait() -> list[Tensor]:
        results = [torch.empty(0)] * len(specs)
        for members, flat in begun:
            pieces = flat().split([specs[index].numel for index in members])
            for index, piece in zip(members, pieces, strict=True):
                # Each result owns its memory: a small one must not keep all others alive.
                results[index] = piece.view(specs[index].size).clone()
        return results

    return wait


def _begin_to_share_flat(
    here: Sequence[Tensor], spec: TensorSpec, home: int, transport: Transport
) -> Callable[[], Tensor]:
    tag = next(transport.result_tags)
    if not here:
        return transport.receive(spec, home, tag).wait
    flat = torch.cat(list(here))
    for other in range(len(transport.stage_ranks)):
        if other != home:
            transport.send(flat, spec, other, tag)
    return lambda: flat


def _real_of(leaf: Any, real: dict[int, Tensor]) -> Any:
    if isinstance(leaf, PlacedTensor):
        return real[id(leaf)]
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
