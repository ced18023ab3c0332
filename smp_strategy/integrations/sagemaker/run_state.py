"""State of a script with SageMaker's functions: options, place of this rank, models and optimizers.

SageMaker's functions have no object that they belong to, so the process has one run, which ``smp.init`` begins. It is
kept in this file, and nowhere else in the package.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sagemaker_options import SageMakerConfig, render_sagemaker
from smp_strategy.engine.degrees import shape_with
from smp_strategy.engine.lifecycle.crash_report import has_crashed
from smp_strategy.engine.lifecycle.run_lifecycle import leave_at_exit
from smp_strategy.engine.rank_group import RankGroup
from smp_strategy.errors import SMPError

if TYPE_CHECKING:
    from smp_strategy.integrations.sagemaker.distributed_model import DistributedModel
    from smp_strategy.integrations.sagemaker.distributed_optimizer import DistributedOptimizer

__all__ = ["RunState", "begin_current", "current_run", "end_current", "is_initialized", "state"]

_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "mp": ("pp", "tp"),
    "dp": ("dp_replicate", "dp_shard", "tp"),
    "pp": ("pp",),
    "tp": ("tp",),
    "rdp": ("dp_replicate", "dp_shard"),
}


@final
class RunState:
    """Options, place of this rank, models and optimizers of a script. Its construction is collective.

    Attributes:
        parameters: SageMaker's parameters as given.
        shape: degrees and rank order.
        groups: groups of this rank, by kind.
        models, optimizers: those that are wrapped.
        noted: notes that were given already.
        at_end: called when the run ends.
    """

    def __init__(self, given: SageMakerConfig, device: torch.device) -> None:
        self.parameters = given.parameters
        self.config = SMPConfig.from_sagemaker_options(given.options)
        self.device = device
        self.rank = dist.get_rank()
        self.shape = shape_with(self.config, self.config.pipeline_parallel_degree or 1)
        self.models: list[DistributedModel] = []
        self.optimizers: list[DistributedOptimizer] = []
        self.noted: set[str] = set()
        self.at_end: list[Callable[[], None]] = []
        world = RankGroup(dist.group.WORLD, tuple(range(self.shape.world_size)))
        self.groups = {"world": world, **RankGroup.along(self.shape, _AXES)}
        for line in (*given.notes, render_sagemaker(given.options)):
            self.report(line)
        leave_at_exit(self._leave)

    def report(self, text: str) -> None:
        """Print ``text``, on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Report ``text``, unless it was reported before."""
        if text not in self.noted:
            self.noted.add(text)
            self.report(text)

    def model_in(self, leaves: Iterable[Any]) -> "DistributedModel":
        """Model among the arguments of a step, or the only one of the script."""
        known = {id(model): model for model in self.models}
        found = {id(leaf): known[id(leaf)] for leaf in leaves if id(leaf) in known}
        candidates = list(found.values()) or self.models
        if len(candidates) == 1:
            return candidates[0]
        if not candidates:
            raise SMPError("There is no model yet: wrap it, `model = smp.DistributedModel(model)`, before the step.")
        raise SMPError(
            f"A function with `@smp.step` runs one model, but {len(candidates)} are meant: give the one that it calls "
            "as an argument, or wrap a module that holds all of them."
        )

    def close(self, *, at_exit: bool = False) -> None:
        """Leave all models, or close their engines at the end of the process, and drop the process groups."""
        for end in self.at_end:
            end()
        for model in self.models:
            if at_exit:
                model.close()
            else:
                model.leave()
        self.models.clear()
        self.optimizers.clear()
        self.groups.clear()

    def _leave(self) -> bool:
        """Close everything when the process ends; whether process groups are to be dropped."""
        if has_crashed() or not self.groups:
            return False
        with contextlib.suppress(Exception):
            self.close(at_exit=True)
        return True


class _Current:
    """Holder of the process's run."""

    def __init__(self) -> None:
        self.run: RunState | None = None


_CURRENT: Final = _Current()


def current_run() -> RunState:
    """The run that ``smp.init`` has begun."""
    if _CURRENT.run is None:
        raise SMPError("Call `smp.init()` first, before any other function of `smp`.")
    return _CURRENT.run


def begin_current(run: RunState) -> None:
    """Make ``run`` the run of the process."""
    _CURRENT.run = run


def end_current() -> None:
    """End the run of the process."""
    if _CURRENT.run is not None:
        _CURRENT.run.close()
    _CURRENT.run = None


def is_initialized() -> bool:
    """Whether ``smp.init`` has been called."""
    return _CURRENT.run is not None


class _Resolved:
    """SageMaker's parameters under their names: as given, or this package's option."""

    def __getattr__(self, name: str) -> Any:
        run = current_run()
        if name == "partitions":
            name = "pipeline_parallel_degree"
        if hasattr(run.config, name):
            return getattr(run.config, name)
        if name in run.parameters:
            return run.parameters[name]
        if name in ("ddp", "horovod", "deterministic_server", "static_mode", "fast_mode", "use_times"):
            return False
        raise AttributeError(f"`smp.state.cfg` has no parameter `{name}`.")


class _StateOfRun:
    """State of the run, as SageMaker's scripts read it."""

    cfg: Final = _Resolved()

    @property
    def model(self) -> "DistributedModel | None":
        """The latest model."""
        return current_run().models[-1] if current_run().models else None

    @property
    def optimizer(self) -> "DistributedOptimizer | None":
        """The latest optimizer."""
        return current_run().optimizers[-1] if current_run().optimizers else None


state: Final = _StateOfRun()
