"""State dicts of models and optimizers: whole, or this rank's part.

SageMaker's scripts ask for a state dict on the ranks of one replica (``if smp.rdp_rank() == 0``). So it is gathered
over the ranks of a replica, each replica by itself. Where ranks of different replicas have different shards
(``sharded_data_parallel_degree``, ``shard_optimizer_state``) it is gathered over all ranks, and all of them must ask.

A part is an ordinary dict with a key ``_smp_is_partial`` (:mod:`smp_strategy.engine.saving.portable_parts`).

Parts of a model: this rank's modules and parameters, and those of split layers, as SageMaker's queries name them.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.portable_parts import (
    model_part,
    optimizer_part,
    put_together,
    whole_model,
    whole_optimizer,
)
from smp_strategy.integrations.sagemaker.run_state import current_run

if TYPE_CHECKING:
    from smp_strategy.integrations.sagemaker.distributed_model import DistributedModel
    from smp_strategy.integrations.sagemaker.distributed_optimizer import DistributedOptimizer

__all__ = [
    "full_model_state",
    "full_optimizer_state",
    "load_model_state",
    "load_optimizer_state",
    "local_model_state",
    "local_optimizer_state",
    "LocalParts",
]


PARTIAL: Final = "_smp_is_partial"


# Models


def full_model_state(model: "DistributedModel", *, on_first_only: bool) -> "OrderedDict[str, Any]":
    """State dict of the whole model. Collective over the ranks that hold different parts of it."""
    engine = model.engine
    engine.saved.check_values()
    if not engine.is_spread:
        return OrderedDict(model.module.state_dict())
    found = put_together(model_part(engine), "`model.state_dict`", _group(engine), on_first_only=on_first_only)
    return whole_model(model.module, found)


def local_model_state(model: "DistributedModel") -> dict[str, Any]:
    """This rank's part of the state dict."""
    engine = model.engine
    engine.saved.check_values()
    if not engine.is_spread:
        return {**model.module.state_dict(), PARTIAL: True}
    return {**model_part(engine), PARTIAL: True}


def load_model_state(model: "DistributedModel", state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state dict of the whole model, or this rank's part of one, which is collective."""
    engine = model.engine
    values = {name: value for name, value in state.items() if name != PARTIAL}
    if state.get(PARTIAL):
        values = put_together(values, "`model.load_state_dict`", _group(engine))
    engine.saved.load_state_dict(values, strict=strict)


# Optimizers


def full_optimizer_state(optimizer: "DistributedOptimizer") -> dict[str, Any]:
    """State dict of the whole optimizer. Collective over the ranks that hold different parts of it."""
    engine, inner = optimizer.model.engine, optimizer.optimizer
    if not _is_divided(engine):
        return inner.state_dict()
    part = optimizer_part(optimizer.model.engine, optimizer.optimizer)
    found = put_together(part, "`optimizer.state_dict`", _group(engine, is_sharded=engine.config.shard_optimizer_state))
    return whole_optimizer(inner, found)


def local_optimizer_state(optimizer: "DistributedOptimizer") -> dict[str, Any]:
    """This rank's part of the state dict, in the form of PyTorch's: numbers are those of the whole one."""
    own = {**optimizer.optimizer.state_dict(), PARTIAL: True}
    if not _is_divided(optimizer.model.engine):
        return own
    state: dict[int, dict[str, Any]] = {}
    for name, value in optimizer_part(optimizer.model.engine, optimizer.optimizer).items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    return {**own, "state": state}


def load_optimizer_state(optimizer: "DistributedOptimizer", state: Mapping[str, Any]) -> None:
    """Load a state dict of the whole optimizer, or this rank's part of one, which is collective."""
    engine = optimizer.model.engine
    if state.get(PARTIAL):
        group = _group(engine, is_sharded=engine.config.shard_optimizer_state)
        part = state.get("part")  # the form of files that are older than this one
        if part is None:
            part = {f"{number}.{key}": value for number, kept in state["state"].items() for key, value in kept.items()}
        found = put_together(part, "`optimizer.load_state_dict`", group)
        state = {**whole_optimizer(optimizer.optimizer, found), "param_groups": state["param_groups"]}
    engine.saved.load_optimizer_state(optimizer.optimizer, state)


def _is_divided(engine: Engine) -> bool:
    return engine.partition is not None and engine.inspection.divides_updates


def _group(engine: Engine, *, is_sharded: bool = False) -> dist.ProcessGroup:
    """Ranks that hold different parts: those of a replica, or all."""
    is_sharded = is_sharded or engine.config.sharded_data_parallel_degree > 1
    return current_run().groups["world" if is_sharded else "mp"].group


class LocalParts(nn.Module):
    """Base class of the wrapped model: iterators over what this rank holds.

    Before the first step this is all of the model. Names are those of the plain model, without a prefix.
    """

    _engine: Engine
    module: nn.Module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, also those of other ranks, under the names of the plain model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """All buffers, also those of other ranks, under the names of the plain model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this rank holds, whole or in part."""
        return ((name, each) for name, each in self.module.named_parameters(recurse=recurse) if self._is_here(each))

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds, whole or in part."""
        return (each for _, each in self.local_named_parameters(recurse))

    def local_named_buffers(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Buffers that this rank holds."""
        for name, buffer in self.module.named_buffers(recurse=recurse):
            if not self._is_apart or self._engine.local_model.holdings.ownership.is_held(name, self._engine.mesh.stage):
                yield name, buffer

    def local_buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Buffers that this rank holds."""
        return (each for _, each in self.local_named_buffers(recurse))

    def local_named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = ""
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules that this rank runs: those of its units, and those above the units."""
        stage = self._engine.mesh.stage
        for name, part in self.module.named_modules(memo, prefix):
            if not self._is_apart or self._engine.inspection.stage_of(part) in (None, stage):
                yield name, part

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that this rank runs: those of its units, and those above the units."""
        return (each for _, each in self.local_named_modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this rank's optimizer updates, under ``shard_optimizer_state``."""
        for name, parameter in self.local_named_parameters():
            if not self._is_apart or self._engine.local_model.holdings.is_updated_here(parameter):
                yield name, parameter

    # Split layers

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules with parameters that are split over a tensor-parallel group."""
        for part in self.module.modules():
            if any(self.is_distributed_parameter(each) for each in part.parameters(recurse=False)):
                yield part

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether the ranks of a tensor-parallel group have a part of ``param`` each."""
        return param in self._engine.layout.split.cuts

    def is_distributed_buffer(self, buf: Tensor) -> bool:
        """Whether the ranks of a tensor-parallel group have a part of ``buf`` each."""
        return any(buf is each for each in self._engine.layout.split.cuts)

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether ``param`` acts on the samples of the whole tensor-parallel group: always so if layers are split."""
        return self._engine.layout.split_report is not None

    def is_scaled_batch_buffer(self, buf: Tensor) -> bool:
        """Whether ``buf`` acts on the samples of the whole tensor-parallel group: always so if layers are split."""
        return self._engine.layout.split_report is not None

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters whose gradients are averaged over all ranks with the same stage."""
        return (
            (name, each) for name, each in self.local_named_parameters() if not self.is_scaled_batch_parameter(each)
        )

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters whose gradients are averaged over the replicas."""
        return ((name, each) for name, each in self.local_named_parameters() if self.is_scaled_batch_parameter(each))

    @property
    def _is_apart(self) -> bool:
        """Whether ranks hold different parts."""
        return self._engine.is_spread

    def _is_here(self, parameter: nn.Parameter) -> bool:
        return not self._is_apart or self._engine.local_model.holdings.is_here(parameter)
