"""The Accelerator's collectives (``gather``, ``reduce``, ...), over data ranks instead of ranks of the world.

The ranks of one replica have the same samples and the same results, so counting each rank would weigh every sample
several times. ``num_processes`` and ``process_index`` count data ranks. Printing, logging and saving
(``is_main_process`` and so on) still happen on a single process of the world. The transport is
:mod:`smp_strategy.engine.data_ranks`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import PROFILE_PATTERN_NAME, ProfileKwargs, recursively_apply
from accelerate.utils import reduce as reduce_over_world
from accelerate.utils.operations import verify_operation
from torch import Tensor

from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate.data import shard_of
from smp_strategy.integrations.accelerate.session import HookBase, Session

__all__ = ["CollectiveHooks"]


class CollectiveHooks(HookBase):
    """Methods of the Accelerator that exchange values, and its properties about processes."""

    flag_tensor: Tensor | None

    @property
    def num_processes(self) -> int:
        """Number of ranks that read samples of their own."""
        return self.smp.num_data_ranks

    @property
    def process_index(self) -> int:
        """Index of the data rank whose samples this rank reads."""
        return self.smp.data_rank

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the world."""
        return self.state.process_index == self.state.num_processes - 1

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Run a function on the first rank of data rank ``process_index``; on no rank if there is no such data rank."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        ranks = self.smp.data_ranks()
        number = 0 if len(ranks) == 1 else process_index
        firsts: dict[int | None, int] = {data_rank: readers[0] for data_rank, readers in enumerate(ranks)}
        return super().on_process(function, firsts.get(number))

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all replicas, on every rank. Collective."""
        with self.smp.main_calls.together():
            return _gather(tensor, self.smp)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors or objects of all replicas, without the duplicates that padded the last batch. Collective."""
        if not use_gather_object and _holds_tensors_only(input_data):
            return super().gather_for_metrics(input_data)
        with self.smp.main_calls.together():
            found = self.smp.data_groups.gather_objects(input_data)
        # As Accelerate: the objects of one process are left alone, those of several are lists.
        data = found[0] if self.num_processes == 1 else [each for objects in found for each in objects]
        state = self.gradient_state
        if state.end_of_dataloader and state.remainder > 0 and isinstance(data, (list, tuple)):
            return data[: state.remainder]
        return data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over replicas. Collective.

        Args:
            tensor: one, or lists, tuples, dicts of them.
            reduction: ``sum``, ``mean``, ``max``, or ``none``, which leaves the values as they are.
            scale: for XLA only.

        Raises:
            ConfigError: the reduction is none of these.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise ConfigError(f"`reduction` must be one of sum, mean, max and none, but is {reduction!r}.")
        with self.smp.main_calls.together():
            return _reduce(tensor, self.smp, reduction)

    def check_trigger(self) -> bool:
        """Whether any rank of the world has called `set_trigger`. Collective."""
        unset = torch.tensor(0, device=self.device)
        with self.smp.main_calls.together():
            is_set = int(reduce_over_world(unset if self.flag_tensor is None else self.flag_tensor, "sum")) > 0
        if is_set:
            self.flag_tensor = unset
        return is_set

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this replica's part of ``inputs``."""
        place = SimpleNamespace(num_processes=self.num_processes, process_index=self.process_index, device=self.device)
        with PartialState.split_between_processes(place, inputs, apply_padding=apply_padding) as mine:
            yield mine

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Override ``even_batches`` of the prepared loaders inside the context.

        Nothing is joined: evaluation needs no other replica, and training raises as soon as the numbers of batches
        differ, see :meth:`~smp_strategy.integrations.accelerate.data.ActiveLoader.check_even`.
        """
        shards = [found for loader in self._dataloaders if (found := shard_of(loader)) is not None]
        before = [shard.even_batches for shard in shards]
        for shard in shards:
            shard.even_batches = shard.even_batches if even_batches is None else even_batches
        try:
            yield
        finally:
            for shard, value in zip(shards, before, strict=True):
                shard.even_batches = value

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile as Accelerate does, with one trace file for each rank of the world."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=self.state.process_index)
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, name))
            self.wait_for_everyone()


@verify_operation  # type: ignore[untyped-decorator]
def _gather(tensor: Any, session: Session) -> Any:
    return recursively_apply(session.data_groups.gather, tensor, error_on_other_type=True)


@verify_operation  # type: ignore[untyped-decorator]
def _reduce(tensor: Any, session: Session, reduction: str) -> Any:
    if reduction == "none":
        return recursively_apply(torch.clone, tensor, error_on_other_type=True)
    return recursively_apply(session.data_groups.reduce, tensor, reduction, error_on_other_type=True)


def _holds_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
