"""Restoring the whole module at the end of a run: every stage broadcasts its parameters, buffers and extra state.

Tensors that the user's hooks have derived from parameters and kept (averages, backups) are restored alike.

Parameters keep their identity and get their former memory layout. Every rank knows the metadata of all parameters.
Buffers may have been replaced, registered or taken away while the module was partitioned, so their holders first send
metadata of them, together with the extra state of modules (``get_extra_state``). Values are sent as raw elements, a
bucket at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.buckets import buckets
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.guarded_tensors import untracked
from smp_strategy.model.ownership import Ownership, bring_back, home_of, spec_of
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.model.units import Unit

__all__ = ["restore"]

_END = "the whole module, at the end of a run"


def restore(holdings: Holdings, *, keep: bool) -> None:
    """Give a partitioned module the values of all stages; collective over the stages of a replica.

    Args:
        holdings: Parameters of this rank.
        keep: Whether this rank wants the whole module; otherwise it only sends.
    """
    root, ownership, mesh = holdings.module, holdings.ownership, holdings.mesh
    mine = [unit for unit in ownership.units if ownership.stage_of[unit.name] == mesh.stage]
    guests = {number: (tensor, home) for number, tensor, home in ownership.guests()}
    numbers = [number for number, (_, home) in guests.items() if min(home.holders) == mesh.stage]
    # The group orders its ranks by number, not by stage.
    told = (
        mesh.stage,
        _buffers(mine),
        _registers(mine),
        _extra_states(mine),
        [(n, spec_of(guests[n][0])) for n in numbers],
    )
    described = collectives.gather_objects(told, _END, mesh.pp_group)
    with untracked():
        for stage, buffers, registers, states, kept in sorted(described, key=lambda description: description[0]):
            away = [parameter for parameter in root.parameters() if _is_sent_by(stage, parameter, ownership, mesh)]
            specs = [*map(spec_of, away), *buffers.values(), *(spec for _, spec in kept)]
            values: list[Tensor] = []
            if stage == mesh.stage:
                values = [*away, *(root.get_buffer(name) for name in buffers), *(guests[n][0] for n, _ in kept)]
            received = iter(_broadcast(values, specs, mesh.stage_ranks[stage], mesh, keep=keep))
            if not keep or stage == mesh.stage:
                continue
            for parameter in away:
                _give(parameter, next(received))
            for name in buffers:
                _set_buffer(root, name, next(received))
            for name, register in registers.items():
                _agree(root, name, register)
            for number, _ in kept:
                value = next(received)
                if number in guests:  # else garbage-collected on this rank
                    _give(guests[number][0], value)
            for name, state in states.items():
                root.get_submodule(name).set_extra_state(state)
        for parameter in root.parameters():
            # Each rank has gradients of its own units only, which would be taken for those of the whole module.
            parameter.grad = None


def _give(tensor: Tensor, value: Tensor) -> None:
    if home_of(tensor) is not None:
        bring_back(tensor, value)


def _is_sent_by(stage: int, parameter: nn.Parameter, ownership: Ownership, mesh: ProcessMesh) -> bool:
    holders = ownership.holders(parameter)
    return len(holders) < mesh.pp and min(holders) == stage


def _buffers(units: Sequence[Unit]) -> dict[str, TensorSpec]:
    """The current buffers of ``units``, by their names in the whole module."""
    return {
        f"{unit.name}.{name}": TensorSpec.of(buffer) for unit in units for name, buffer in unit.module.named_buffers()
    }


class _Register(NamedTuple):
    """Registered buffers of a module."""

    buffers: dict[str, str | None]
    """For each its name among those that are sent, or ``None`` as its value."""
    hidden: frozenset[str]
    """Those that are not persistent."""


def _registers(units: Sequence[Unit]) -> dict[str, _Register]:
    """Registers of the modules of ``units`` with buffers, now or at first, by their names in the whole module."""
    found: dict[str, _Register] = {}
    for unit in units:
        names = {id(buffer): f"{unit.name}.{name}" for name, buffer in unit.module.named_buffers()}
        for name, module in unit.module.named_modules():
            buffers = {key: None if each is None else names[id(each)] for key, each in module._buffers.items()}
            hidden = frozenset(module._non_persistent_buffers_set)
            found[f"{unit.name}.{name}".removesuffix(".")] = _Register(buffers, hidden)
    return found


def _agree(root: nn.Module, name: str, register: _Register) -> None:
    """Register the buffers of a module, which have their values by now, as their holder has."""
    owner = root.get_submodule(name)
    present = owner._buffers
    if not present and not register.buffers:
        return
    for key in [key for key in present if key not in register.buffers]:
        del present[key]
    for key, source in register.buffers.items():
        if source is None:
            present[key] = None
        elif source != f"{name}.{key}":  # further name of a buffer
            present[key] = root.get_buffer(source)
    owner._non_persistent_buffers_set = set(register.hidden)


def _extra_states(units: Sequence[Unit]) -> dict[str, Any]:
    return {
        f"{unit.name}.{name}".removesuffix("."): module.get_extra_state()
        for unit in units
        for name, module in unit.module.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _set_buffer(root: nn.Module, name: str, value: Tensor) -> None:
    path, _, key = name.rpartition(".")
    owner = root.get_submodule(path)
    buffer = owner._buffers.get(key)
    if buffer is not None and home_of(buffer) is not None and buffer.dtype == value.dtype:
        bring_back(buffer, value)
    elif buffer is None or home_of(buffer) is not None:
        owner._buffers[key] = value


def _broadcast(
    values: Sequence[Tensor], specs: Sequence[TensorSpec], source: int, mesh: ProcessMesh, *, keep: bool
) -> list[Tensor]:
    """Broadcast ``values`` from the rank ``source``; other ranks get them if they ``keep`` them."""
    received: list[Tensor] = []
    for numbers in buckets(specs):
        sizes = [specs[number].numel for number in numbers]
        flat = torch.empty(sum(sizes), dtype=specs[numbers[0]].dtype, device=specs[numbers[0]].device)
        pieces = flat.split(sizes)
        if mesh.rank == source:
            for number, piece in zip(numbers, pieces, strict=True):
                piece.copy_(values[number].detach().reshape(-1))
        collectives.broadcast(flat, source, group=mesh.pp_group, doing=_END).wait()
        if keep and mesh.rank != source:
            for number, piece in zip(numbers, pieces, strict=True):
                spec = specs[number]
                received.append(_empty(spec).copy_(piece.view(spec.size)))
    return received


def _empty(spec: TensorSpec) -> Tensor:
    """Memory for the elements of ``spec``, without the gaps and overlaps of a strided view."""
    layout = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
    return torch.empty_like(layout, device=spec.device)
