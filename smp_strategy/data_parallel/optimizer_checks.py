"""Optimizer checks: whether an optimizer computes the same on pieces of a parameter as on the whole parameter.

Under parameter sharding a rank updates pieces of parameters: one-dimensional runs of their elements, some of them
empty. That is right for elementwise optimizers (SGD, Adam, Lion ...), and silently wrong for those that look at a
parameter as a whole: at its matrix (Muon, Shampoo), its rows (Adafactor), its norm (LAMB), its number of dims (weight
decay for matrices only), or at all parameters (Prodigy). Of a split layer a rank updates a part along one dim, which is
the same except for the number of dims.

Any optimizer may be used, so it is tried. A twin with the same options takes some steps with a small stand-in of the
parameter, and other twins, one for each rank that there could be, with the pieces of it. Afterwards the values must be
the same, and the state must be either the same on all ranks or have the shape of the pieces: the latter tells of
matrices that will be used at later steps only. Steps are as large as values, whatever the learning rate is (warm-ups
begin at zero), so that it shows in what ratio.

Kernels compute the last elements of a tensor, which fill no vector, differently from the others, so values may differ
by some units in their last place. Where these are large (``bfloat16``) the trial also takes place in ``float32``. An
optimizer that draws random numbers differs. One that cannot be tried at all (because it wants a closure, or sparse
gradients) is not used on trust either.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.optimizer_dependence import can_be_dealt_out
from smp_strategy.data_parallel.optimizer_probe import step_by_values, take_step, twin_of

__all__ = ["difference_in_parts", "difference_in_pieces", "problems_of_cuts"]

NUM_STEPS = 3
UNITS_IN_THE_LAST_PLACE = 8
# Largest sizes of a stand-in, by number of dims: large enough for code paths of large parameters.
_MOST_PER_DIM = {1: 4096, 2: 160, 3: 24, 4: 10}
_LEAST_MOST_PER_DIM = 5


def problems_of_cuts(
    optimizers: Iterable[Optimizer],
    sharded: Mapping[nn.Parameter, str],
    *,
    degree: int,
    split: Mapping[nn.Parameter, tuple[str, int]] = MappingProxyType({}),
    device: torch.device | None = None,
) -> list[str]:
    """Problem and remedy for each optimizer that cannot update pieces or parts of parameters, in sentences.

    Only the metadata of parameters count, so that all ranks come to the same result, wherever values are.

    Args:
        optimizers: Optimizers of the model. They, and their schedulers, are not changed.
        sharded: Names of the parameters of all stages that are cut into pieces.
        degree: Number of ranks over which they are sharded.
        split: Names of the parameters of all stages that are cut along one dim, and that dim.
        device: Device of the trial; by default the CPU.
    """
    problems = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            which = f" in parameter group {number}" if len(optimizer.param_groups) > 1 else ""
            with torch.inference_mode(False):  # before `predict` as well
                found = _refused(optimizer, group, sharded, split, device or torch.device("cpu"))
            in_pieces = {each: reason for (each, is_part), reason in found.items() if not is_part}
            in_parts = {each: reason for (each, is_part), reason in found.items() if is_part}
            if in_pieces:
                problems.append(
                    f"`sharded_data_parallel_degree` ({degree}) cuts parameters into pieces, and {name}{which} cannot "
                    f"update pieces of {_listed(in_pieces)}. {_instead_of_pieces(optimizer)}, or use an optimizer that "
                    "treats every element by itself."
                )
            if in_parts:
                problems.append(
                    f"`tensor_parallel_degree` splits layers, and {name}{which} cannot update parts of "
                    f"{_listed(in_parts)}. Use an optimizer that treats every element by itself, or keep these layers "
                    "whole (`set_tensor_parallelism(module, False)`)."
                )
    return problems


def _instead_of_pieces(optimizer: Optimizer) -> str:
    if can_be_dealt_out(optimizer):
        return "Use `shard_optimizer_state=True` instead, which gives each rank whole parameters"
    return "Leave the degree out and let replicas each have the whole model and update all of it"


def _listed(reasons: Mapping[str, str]) -> str:
    (first, reason), more = next(iter(reasons.items())), len(reasons) - 1
    return f"`{first}`{f' and {more} other parameter' if more else ''}{'s' * (more > 1)}: {reason}"


def difference_in_pieces(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    shape: Sequence[int],
    edges: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> str | None:
    """Difference that it makes to give ``optimizer`` pieces of a parameter, as a half-sentence; ``None``: none.

    Args:
        optimizer: Optimizer, which is not changed: twins of it are tried.
        parameter: One of its parameters, which determines the options.
        shape: Shape of the stand-in.
        edges: First elements of the second piece, the third ...
        dtype: Dtype of the stand-in; by default that of ``parameter``.
        device: Device of the stand-in.
    """
    total = math.prod(shape)
    edges = _edges(shape) if edges is None else edges
    slices = [slice(start, stop) for start, stop in itertools.pairwise([0, *edges, total])]

    def pieces(tensor: Tensor) -> list[Tensor]:
        return [tensor.flatten()[piece] for piece in slices]

    begin, gradients = _values(shape, dtype or parameter.dtype, device)
    return _difference(optimizer, parameter, begin, gradients, pieces)


def difference_in_parts(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    shape: Sequence[int],
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> str | None:
    """Difference that it makes to give ``optimizer`` parts along ``dim``; see :func:`difference_in_pieces`."""

    def parts(tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.tensor_split(2, dim)]

    # At least two parts, although this rank's size along the dim may be 1.
    shape = (*shape[:dim], max(shape[dim], 2), *shape[dim + 1 :])
    begin, gradients = _values(shape, dtype or parameter.dtype, device)
    return _difference(optimizer, parameter, begin, gradients, parts)


def _difference(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    begin: Tensor,
    gradients: Sequence[Tensor],
    cut: Callable[[Tensor], list[Tensor]],
) -> str | None:
    try:
        whole, kept, reach = _trained(optimizer, parameter, begin, gradients)
    except Exception as error:
        return f"it cannot be tried, hence not be trusted ({_shown(error)})"
    try:
        of_parts = zip(cut(begin.detach()), *(cut(each) for each in gradients), strict=True)
        found = [_trained(optimizer, parameter, first, rest) for first, *rest in of_parts]
    except Exception as error:
        return f"it needs whole tensors ({_shown(error)})"
    same = zip(cut(whole), (values for values, _, _ in found), cut(reach), strict=True)
    if not all(_are_close(*each) for each in same):
        return "its steps look at more than one element at a time and lead to other values"
    return _difference_in_state(kept, whole.shape, [(state, values.shape) for values, state, _ in found])


def _refused(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    sharded: Mapping[nn.Parameter, str],
    split: Mapping[nn.Parameter, tuple[str, int]],
    device: torch.device,
) -> dict[tuple[str, bool], str]:
    """Reasons by name of the parameter and whether it is about parts; parameters of one kind are tried once."""
    found: dict[tuple[str, bool], str] = {}
    known: dict[object, str | None] = {}
    for parameter in group["params"]:
        if not parameter.requires_grad or not parameter.numel():
            continue
        most = _MOST_PER_DIM.get(parameter.ndim, _LEAST_MOST_PER_DIM)
        shape = tuple(min(size, most) for size in parameter.shape)
        cuts: list[tuple[str, int | None]] = [(sharded[parameter], None)] if parameter in sharded else []
        cuts += [split[parameter]] if parameter in split else []
        for (name, dim), dtype in itertools.product(cuts, _dtypes(parameter.dtype)):
            if (shape, dim, dtype) not in known:
                known[shape, dim, dtype] = (
                    difference_in_pieces(optimizer, parameter, shape, dtype=dtype, device=device)
                    if dim is None
                    else difference_in_parts(optimizer, parameter, shape, dim, dtype=dtype, device=device)
                )
            if (reason := known[shape, dim, dtype]) is not None:
                found.setdefault((name, dim is not None), reason)
    return found


def _dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, torch.float32) if dtype.itemsize < torch.float32.itemsize else (dtype,)


def _edges(shape: Sequence[int]) -> list[int]:
    """Two pieces that are no whole rows, and between them an empty one."""
    total = math.prod(shape)
    edge = total // 3
    if shape and edge % shape[-1] == 0 and edge + 1 < total:
        edge += 1
    return [edge, edge]


def _values(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> tuple[nn.Parameter, list[Tensor]]:
    """Initial values, and a gradient for each step: uneven, each in its own way, so that ratios of norms differ."""
    random = torch.Generator().manual_seed(0)
    uneven = torch.linspace(1, 10, math.prod(shape)).reshape(tuple(shape))

    def draw(scale: Tensor) -> Tensor:
        size = torch.rand(tuple(shape), generator=random) + 0.5  # squares of none are lost in half precision
        sign = torch.randn(tuple(shape), generator=random).sign()
        return (scale * size * sign).to(device=device, dtype=dtype)

    begin = draw(uneven / 100)
    return nn.Parameter(begin), [draw(scale / uneven) for scale in (30, 10, 20)]


def _trained(
    optimizer: Optimizer, parameter: nn.Parameter, begin: Tensor, gradients: Iterable[Tensor]
) -> tuple[Tensor, Any, Tensor]:
    """Values and state after the steps, and the sum over the steps of the elements' absolute values."""
    stand_in = nn.Parameter(begin.detach().clone())
    twin = twin_of(optimizer, parameter, stand_in)
    step_by_values(twin)
    reach = stand_in.detach().abs()
    for gradient in gradients:
        stand_in.grad = gradient.clone()
        take_step(twin)
        reach += stand_in.detach().abs()
    [group] = twin.param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    return stand_in.detach(), (twin.state.get(stand_in, {}), options), reach


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _are_close(one: Tensor, other: Tensor, reach: Tensor) -> bool:
    tolerance = UNITS_IN_THE_LAST_PLACE * torch.finfo(one.dtype).eps
    return bool(((one - other).abs() <= tolerance * reach).all())


def _difference_in_state(whole: Any, shape: Sequence[int], pieces: Sequence[tuple[Any, Sequence[int]]]) -> str | None:
    leaves = pytree.tree_leaves(whole)
    of_pieces = [(pytree.tree_leaves(kept), shape) for kept, shape in pieces]
    # Also if a piece is empty: checkpoints are put together by all ranks alike.
    if any(len(others) != len(leaves) for others, _ in of_pieces):
        return "it keeps something else for them than for whole tensors"
    for number, leaf in enumerate(leaves):
        others = [(of_piece[number], of_part) for of_piece, of_part in of_pieces]
        if isinstance(leaf, Tensor):
            is_cut = leaf.shape == shape and all(other.shape == of_part for other, of_part in others)
            if not is_cut and not all(torch.equal(leaf, other) for other, _ in others):
                return f"it keeps a tensor of shape {list(leaf.shape)}, which is not one value per element"
        elif isinstance(leaf, (int, float, complex, str)) and any(other != leaf for other, _ in others):
            return f"it goes by a number of all elements (here {leaf!r}, of a piece {others[0][0]!r})"
    return None
