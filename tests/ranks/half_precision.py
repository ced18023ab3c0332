"""Half-precision training in one process, with all casts by hand, to compare engines with."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from tests.parity.models import MODELS, batch_for
from tests.ranks.test_state_sharding import OPTIMIZERS, SAMPLES, STEPS, train

__all__ = ["ByHand", "half_rank", "one_half_process", "weights_each_way"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16_params": torch.float16}


class ByHand:
    """Lets ``units`` of a model compute in ``dtype``, on copies of its float32 parameters made for each call."""

    def __init__(self, model: nn.Module, units: Iterable[str], dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        full = {
            id(parameter)
            for part in model.modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
            for parameter in part.parameters()
        }
        for name in units:
            unit = model.get_submodule(name)
            unit.forward = self.around(unit, unit.forward, full)  # type: ignore[method-assign]

    def half(self, tensor: Any) -> Any:
        return tensor.to(self.dtype) if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor

    def around(self, unit: nn.Module, forward: Any, full: set[int]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map(self.half, (args, kwargs))
            places = [
                (part._parameters, name, parameter)
                for part in unit.modules()
                for name, parameter in part._parameters.items()
                if parameter is not None and id(parameter) not in full
            ]
            for found, name, parameter in places:
                found[name] = parameter.to(self.dtype)  # so each use's gradient is cast before it is added
            _flatten_again(unit)
            try:
                with torch.autocast("cpu", enabled=False):
                    return forward(*args, **kwargs)
            finally:
                for found, name, parameter in places:
                    found[name] = parameter
                _flatten_again(unit)

        return run

    def backward(self, batch: Any, factor: float) -> None:
        """Of one microbatch: gradients come in half precision, and are added up in float32."""
        with torch.autocast("cpu", self.dtype):
            loss = self.model.loss(batch)
        assert loss.dtype == torch.float32
        (loss * factor).backward()


def _flatten_again(unit: nn.Module) -> None:
    """Recurrent modules keep a list of their weights."""
    for part in unit.modules():
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]


def one_half_process(  # noqa: PLR0913
    name: str,
    kind: str,
    units: Iterable[str],
    dtype: torch.dtype,
    layout: tuple[int, int],
    together: int | None = None,
    max_norm: float | None = None,
    without_masters: bool = False,
    sums_in: torch.dtype = torch.float32,
) -> Any:
    """See :func:`tests.ranks.test_state_sharding.one_process`.

    Args:
        layout: numbers of replicas and microbatches.
        without_masters: round parameters to ``dtype`` after each step, and what the optimizer gets and keeps.
        sums_in: dtype to which sums of gradients are rounded after each addition.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    if without_masters:
        return _half_parameters(model, OPTIMIZERS[kind], (name, units, dtype), layout, together, sums_in)
    by_hand = ByHand(model, units, dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    norms = []
    for step in range(STEPS):
        total = summed(by_hand, name, step, layout, together)
        for parameter in model.parameters():
            parameter.grad = total[parameter] / layout[0] if parameter in total else None
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model.state_dict(), optimizer.state_dict(), norms


def summed(
    by_hand: ByHand,
    name: str,
    step: int,
    layout: tuple[int, int],
    together: int | None,
    rounded: torch.dtype = torch.float32,
) -> dict[nn.Parameter, Tensor]:
    """Sums of the gradients of all replicas, ``rounded`` after each addition."""
    model, (replicas, microbatches) = by_hand.model, layout
    total: dict[nn.Parameter, Tensor] = {}
    sums: dict[nn.Parameter, Tensor] = {}
    for replica in range(replicas):
        model.zero_grad()
        parts, sizes = split(batch_for(name, step * replicas + replica, SAMPLES), microbatches)
        for part, size in zip(parts, sizes, strict=True):
            by_hand.backward(part, size / sum(sizes))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(rounded).float()
        for parameter in model.parameters():
            if parameter.grad is not None:
                total_here = sums[parameter] + parameter.grad if parameter in sums else parameter.grad
                sums[parameter] = total_here.to(rounded).float()
        if (replica + 1) % (together or replicas) == 0:
            total.update((each, total[each] + part if each in total else part) for each, part in sums.items())
            sums.clear()
    return total


def _half_parameters(
    model: nn.Module, make: Any, what: Any, layout: tuple[int, int], together: int | None, rounded: torch.dtype
) -> Any:
    """Parameters in ``dtype``; a float32 model with the same values computes the gradients."""
    name, units, dtype = what
    halves = copy.deepcopy(model).to(dtype)
    by_hand = ByHand(model, units, dtype)
    optimizer = make(halves.parameters())
    for step in range(STEPS):
        with torch.no_grad():
            for parameter, half in zip(model.parameters(), halves.parameters(), strict=True):
                parameter.copy_(half)
        total = summed(by_hand, name, step, layout, together, rounded)
        for parameter, half in zip(model.parameters(), halves.parameters(), strict=True):
            half.grad = (total[parameter] / layout[0]).to(dtype) if parameter in total else None
        optimizer.step()
    return halves.state_dict(), optimizer.state_dict(), []


def half_rank(
    name: str, kind: str, options: dict[str, Any], max_norm: float | None = None, reduces: bool = False
) -> Any:
    """Train on this rank; returns whole weights and state (rank 0), norms, the module afterwards, names of units."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer: Optimizer = OPTIMIZERS[kind](model.parameters())
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    norms = train(engine, model, optimizer, name, range(STEPS), max_norm, reduces)
    state, of_optimizer = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    units = [unit.name for unit in engine.layout.units]
    engine.detach()
    restored = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    engine.close()
    return state, of_optimizer, norms, restored, units


def weights_each_way(name: str, ways: Iterable[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Whole weights (rank 0) after training on this rank, once for each of the options."""
    return [half_rank(name, "momentum", options)[0] for options in ways]
