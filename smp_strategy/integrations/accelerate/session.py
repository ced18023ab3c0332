"""What the hooks of one Accelerator share: options, this rank's place, and the engine.

Scripts ask for the number of processes, and prepare data loaders, before the model is known. So the degrees are
settled here, from the options and the number of ranks alone, and the engine is made when the model comes.

What the hooks of the Accelerate door stand on: an Accelerator with a :class:`Session`.

An Accelerator becomes one of ours in the middle of its construction, by another class (see
:mod:`smp_strategy.integrations.accelerate.plugin`). So no ``__init__`` of ours runs; what hooks need is made in
:meth:`begin`.
"""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape, check_degree
from smp_strategy.distributed.rendezvous import alike, meet
from smp_strategy.distributed.topology import find_node_size
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import SMPError, UnsupportedError
from smp_strategy.integrations.accelerate.data_ranks import DataGroups
from smp_strategy.integrations.accelerate.model_calls import ModelCalls
from smp_strategy.integrations.accelerate.saving_calls import StateCalls
from smp_strategy.model.trace.pytree import flatten

__all__ = ["HookBase", "Session"]


@final
class Session:
    """One Accelerator's.

    The default process group must exist.

    Args:
        config: all options. Without any degree all ranks are stages of one pipeline.
        device: where this rank computes.
        timeout: longest wait for another rank; ``None``: that of the backend.

    Attributes:
        config: the same, with the number of stages.
        shape: degrees and rank order.
        rank: global rank of this process.
        syncs_blocked: nesting depth of ``no_sync``.
        calls: replaced calls of the partitioned model; ``None`` until one is prepared.
        state_calls: replaced ``state_dict`` methods of all prepared models.
        background: asynchronous saves.

    Raises:
        ConfigError: the degrees do not fit the number of ranks.
    """

    def __init__(self, config: SMPConfig, device: torch.device, *, timeout: timedelta | None = None) -> None:
        world_size = dist.get_world_size()
        self.config = _with_degree(config, world_size)
        self.device = device
        self.rank = dist.get_rank()
        pp, dp_shard = self.config.pipeline_parallel_degree, config.sharded_data_parallel_degree
        assert pp is not None
        tp = config.tensor_parallel_degree
        self.config.check(pp)
        check_degree(pp, world_size, dp_shard=dp_shard, tp=tp)
        self.shape = MeshShape.of_world(
            world_size,
            pp=pp,
            dp_shard=dp_shard,
            tp=tp,
            placement=config.placement_strategy,
            node_size=find_node_size(dp_shard),
        )
        self._timeout = timeout
        self.syncs_blocked = 0
        self.calls: ModelCalls | None = None
        self.state_calls: list[StateCalls] = []
        self.background = BackgroundSave()
        self._engine: Engine | None = None
        self._data_groups: DataGroups | None = None

    @property
    def engine(self) -> Engine:
        """What runs the model; exists once a model is prepared."""
        if self._engine is None:
            raise SMPError("There is no pipeline before a model is prepared: call `accelerator.prepare(model, ...)`.")
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether a model is prepared."""
        return self._engine is not None

    def make_engine(self, *, keeps_buffers: bool = False) -> Engine:
        """A new engine, for a model that is prepared now; the last one is closed.

        Args:
            keeps_buffers: whether each replica goes on with buffers of its own, whatever the options say.
        """
        self._close_engine()
        config = dataclasses.replace(self.config, broadcast_buffers=False) if keeps_buffers else self.config
        self._engine = Engine(config, report=self._report, device=self.device, timeout=self._timeout)
        return self._engine

    def with_weights(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with all weights and gradients in sight, as one process has them. All ranks have to do it.

        For code that goes over the parameters of the model between steps: averages of weights, norms, ties.

        Returns:
            What ``function`` returns, with real tensors on every rank.

        Raises:
            UnsupportedError: gradients might be expected to flow through that.
        """
        if self._engine is None:
            return function()
        meet("accelerator.smp.with_weights")
        self._engine.reduce_gradients()
        found = self._engine.run_hook(function)
        if torch.is_grad_enabled() and any(_is_floating(leaf) for leaf in flatten(found)[0]):
            raise UnsupportedError(
                "What the function of `with_weights` returns comes out without a history: a loss that it is added to "
                "would not train the weights for it. Call `with_weights` under `torch.no_grad()` if that is right; "
                "compute a penalty for weights in the `forward` of the model, or use `weight_decay` of the optimizer."
            )
        return found

    @property
    def data_groups(self) -> DataGroups:
        """Between which values are exchanged. Made when they are first asked for, which is collective."""
        if self._data_groups is None:
            self._data_groups = DataGroups(self.data_ranks(), timeout=self._timeout)
        return self._data_groups

    @property
    def num_data_ranks(self) -> int:
        """How many ranks read samples of their own; to a script these are all processes that there are."""
        return self.shape.dp * (1 if self.config.prescaled_batch else self.shape.tp)

    @property
    def data_rank(self) -> int:
        """Which of them this one is, or reads the samples of."""
        return self._data_rank_of(self.rank)

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks of this one's pipeline."""
        return list(self.shape.group(self.rank, "pp"))

    def data_ranks(self) -> list[list[int]]:
        """The global ranks that read alike, the first of each pipeline first, for each data rank."""
        found: list[list[int]] = [[] for _ in range(self.num_data_ranks)]
        for rank in range(self.shape.world_size):
            found[self._data_rank_of(rank)].append(rank)
        return found

    def _data_rank_of(self, rank: int) -> int:
        here = self.shape.coordinates(rank)
        dp_rank = here["dp_replicate"] * self.shape.dp_shard + here["dp_shard"]
        return dp_rank if self.config.prescaled_batch else dp_rank * self.shape.tp + here["tp"]

    def _report(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def settle(self) -> None:
        """Wait for asynchronous saves; if one failed on any rank, raise on all. Collective."""
        if self.config.async_save:
            with alike("saving in the background"):
                self.background.wait()

    def close(self) -> None:
        """Let go of the engine, if there is one, and of all process groups; the module stays as it is."""
        self._close_engine()
        self._data_groups = None

    def let_go(self) -> None:
        """Forget the engine without closing it: a module that it has left spread may still need it."""
        self._engine = None

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


def _with_degree(config: SMPConfig, world_size: int) -> SMPConfig:
    """``config`` with the number of stages: all ranks, or one where they are wanted for something else."""
    if config.pipeline_parallel_degree is not None:
        return config
    others = config.shard_optimizer_state or config.sharded_data_parallel_degree * config.tensor_parallel_degree > 1
    degree = 1 if others else world_size
    return dataclasses.replace(config, pipeline_parallel_degree=degree, microbatches=config.num_microbatches(degree))


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class HookBase(Accelerator):  # type: ignore[misc]  # published without type information
    """Base of all hooks.

    Attributes:
        smp: options, this rank's place, and the engine.
    """

    smp: Session

    def begin(self, session: Session, plugin: Any) -> None:
        """Called once, when only the processes are known. Hooks extend it with what they need.

        Args:
            session: becomes :attr:`smp`.
            plugin: the :class:`~smp_strategy.integrations.accelerate.plugin.SMPPlugin`.
        """
        self.smp = session
