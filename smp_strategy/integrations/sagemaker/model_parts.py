"""Parts of a model: this rank's modules and parameters, and those of split layers, as SageMaker's queries name them."""

from collections.abc import Iterator

from torch import Tensor, nn

from smp_strategy.engine.engine import Engine

__all__ = ["LocalParts"]


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
            if not self._is_apart or self._engine.local_model.ownership.is_held(name, self._engine.mesh.stage):
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
        split = self._engine.layout.split
        return split is not None and param in split.cuts

    def is_distributed_buffer(self, buf: Tensor) -> bool:
        """Whether the ranks of a tensor-parallel group have a part of ``buf`` each."""
        split = self._engine.layout.split
        return split is not None and any(buf is each for each in split.cuts)

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether ``param`` acts on the samples of the whole tensor-parallel group: always so if layers are split."""
        return self._engine.layout.split is not None

    def is_scaled_batch_buffer(self, buf: Tensor) -> bool:
        """Whether ``buf`` acts on the samples of the whole tensor-parallel group: always so if layers are split."""
        return self._engine.layout.split is not None

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
