"""Checkpoint state of an engine: the state dicts of the module and of optimizers, and its own counters.

There are two forms. The *full* state is that of a single process, on global rank 0. The *held* state names every tensor
by its full shape, with the rectangles of it that this rank has; sharded checkpoints are made of it. Loaded state is
always full, in memory or in files, and each rank takes its part.

Before the first step every rank has the whole module, and the partition is not known. Weights are loaded at once; the
state of optimizers waits for the first step (:mod:`smp_strategy.engine.saving.pending_state`).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, final

from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint import full_state_dict as full
from smp_strategy.checkpoint.load import (
    GRADIENTS,
    MODULE,
    load_gradients,
    load_groups,
    load_module,
    load_optimizer,
    optimizer_key,
)
from smp_strategy.checkpoint.sources import EditedState, WholeState
from smp_strategy.checkpoint.spread_state import SpreadState
from smp_strategy.checkpoint.state_dict import (
    gradient_state,
    kept_by,
    module_state,
    named_state,
    optimizer_state,
    whole_module_state,
    whole_optimizer_state,
)
from smp_strategy.checkpoint.storage.full_file import replacing_full
from smp_strategy.checkpoint.storage.held_tensor import Source
from smp_strategy.checkpoint.storage.remote_path import local_path
from smp_strategy.checkpoint.storage.writer import Prepared, ShardedWriter
from smp_strategy.checkpoint.torch_file import UnfilledState, write_torch_file
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.saving.pending_state import PendingOptimizerState
from smp_strategy.model.deferred_tensor import DeferredTensor, lacks_values
from smp_strategy.model.guarded_tensors import in_plain_sight

__all__ = ["SavedState", "own_state_dict", "promised_to"]


def own_state_dict(module: nn.Module) -> dict[str, Any]:
    """State dict with the parameters and buffers themselves, which may lack values."""
    with in_plain_sight():
        return module.state_dict(keep_vars=True)


def promised_to(states: list[UnfilledState]) -> full.Take:
    """Makes entries without values, which are gathered when a file is written; notes their states in ``states``."""

    def take(spread: SpreadState) -> "OrderedDict[str, Any]":
        states.append(UnfilledState(spread))
        return states[-1].entries()

    return take


@final
class SavedState:
    """Saves and loads the state of an engine.

    Attributes:
        note: is told what a checkpoint has in another form than it was given.
        scaled: returns optimizers that have a loss scale of their own.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._writers: dict[str, ShardedWriter] = {}
        self.note: Callable[[str], None] = logging.getLogger("smp_strategy").info
        self.scaled: Callable[[], Sequence[Any]] = tuple

    # Spread over ranks

    def held_state(self, optimizers: Sequence[Optimizer], *, gradients: bool = False) -> dict[str, Any]:
        """State of the module and of ``optimizers`` that this rank holds, without copies.

        Args:
            optimizers: in the order of their numbers.
            gradients: include those that the next steps will add to. They are summed up over ranks first, so this is
                collective then, and where there are replicas the last bits of later sums may be others than without.

        Returns:
            ``{"state_dict": ..., "optimizer_0": {"state": ..., "param_groups": ...}, ..., "gradients": ...}``, with a
            :class:`~smp_strategy.checkpoint.storage.held_tensor.HeldTensor` for each tensor.
        """
        assert self._parts.module is not None
        self._parts.delayed.refuse_saving()
        if gradients:
            self._parts.reduce_gradients()
        is_first, local_model = self._parts.mesh.rank == 0, self._parts.local_model
        with self._parts.views.put_aside():
            if local_model is not None:
                local_model.compare_updates()
                local_model.settle()
            if local_model is not None and local_model.whole_on == "none":
                state = {MODULE: module_state(local_model.holdings)}
            elif local_model is None or local_model.whole_on == "all" or is_first:
                state = {MODULE: whole_module_state(self._parts.module, is_first=is_first)}
            else:
                state = {MODULE: {}}
            for number, optimizer in enumerate(optimizers):
                state[optimizer_key(number)] = self._held_optimizer_state(optimizer)
            if gradients and local_model is not None:
                state[GRADIENTS] = gradient_state(local_model.holdings)
        return state

    def prepared(self, state: Mapping[str, Any], *, copy: bool = False, use: str = "background") -> Prepared:
        """This rank's share of ``state``, ready to be written to a folder. Collective.

        Args:
            state: state that this rank holds, see :meth:`held_state`.
            copy: whether it may change before it is written, perhaps by a thread.
            use: one of the ways of writing, which may be under way at the same time.
        """
        if use not in self._writers:
            self._writers[use] = ShardedWriter(lambda: self._parts.mesh.saving_group(use))
        return self._writers[use].prepare(state, copy=copy)

    def close(self) -> None:
        """Drop the process groups of writers."""
        self._writers.clear()

    def _held_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._parts.module is not None
        is_first = self._parts.mesh.rank == 0
        if optimizer in self._parts.pending.optimizers:
            kept = self._parts.pending.optimizers[optimizer].read() if is_first else {}
            return whole_optimizer_state(optimizer, kept, self._names, is_first=is_first)
        if self._parts.local_model is not None:
            return optimizer_state(self._parts.local_model.holdings, optimizer)
        return whole_optimizer_state(optimizer, kept_by(optimizer), self._names, is_first=is_first)

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        assert self._parts.module is not None
        return {parameter: name for name, parameter in self._parts.module.named_parameters()}

    def load_stored(self, source: Source, *, strict: bool = True) -> None:
        """Load this rank's share of the module's state, or all of it where the module is whole. Collective.

        Raises:
            RuntimeError: names or shapes do not fit, as from ``nn.Module.load_state_dict``.
            CheckpointError: the values cannot be read.
        """
        assert self._parts.module is not None
        local_model = self._parts.local_model
        with self._parts.views.put_aside():
            if local_model is not None:
                local_model.settle()
            if local_model is not None and not local_model.is_whole_here:
                load_module(self._parts.module, source, local_model.holdings, strict=strict)
                return
            self._parts.delayed.expect()
            if expected := self._parts.delayed.expected:
                self._parts.pending.expect_module(source, strict=strict)
            load_module(self._parts.module, source, None, strict=strict, leave_out=expected)

    def load_stored_optimizer(
        self, source: Source | Mapping[str, Any], number: int, optimizer: Optimizer, *, with_state: bool = True
    ) -> None:
        """Load this rank's share of the state of ``optimizer``; before the first step it waits for that.

        Args:
            source: has the state; nested dicts, as hooks may have edited them, or a file of another kind.
            number: of the optimizer there.
            optimizer: takes it.
            with_state: whether more is loaded than the options of its groups; otherwise the rest is reset.

        Raises:
            CheckpointError: it is that of an optimizer for other parameters, or cannot be read.
        """
        load_groups(optimizer, found := _as_source(source), number, self._names)
        self._load_optimizer(optimizer, found if with_state else WholeState({}), number, self._names)

    def _load_optimizer(
        self, optimizer: Optimizer, source: Source, number: int, names: Mapping[nn.Parameter, str]
    ) -> None:
        if self._parts.local_model is None or self._parts.calls.runtime is None:
            self._parts.pending.optimizers[optimizer] = PendingOptimizerState(source, number, names)
        else:
            self._parts.pending.optimizers.pop(optimizer, None)
            load_optimizer(optimizer, source, number, self._parts.local_model.holdings, names)

    def load_stored_gradients(self, given: Source | Mapping[str, Any]) -> None:
        """Load accumulated gradients, if ``given`` has any."""
        source = _as_source(given)
        if self._parts.local_model is None or self._parts.calls.runtime is None:
            self._parts.pending.expect_gradients(source)
        else:
            load_gradients(source, self._parts.local_model.holdings)

    def check_values(self) -> None:
        """Refuse to save before the first step has given values to the module.

        Raises:
            UnsupportedError: some tensors are on the meta device.
        """
        if self._parts.module is not None:
            self._parts.delayed.refuse_saving()

    def spread_state(self) -> SpreadState:
        """State dict of the module, to be written to files of whole tensors that no rank has all of. Collective."""
        held = self.held_state(())[MODULE]
        assert self._parts.module is not None
        return SpreadState(held, own_state_dict(self._parts.module))

    # In a file that no rank has as a whole

    @property
    def is_partitioned(self) -> bool:
        """Whether states are those of a partitioned module, from its first step on."""
        return self._parts.local_model is not None

    @property
    def is_whole_on_first(self) -> bool:
        """Whether global rank 0 has all values of the module, and no other rank."""
        return self._parts.local_model is not None and self._parts.local_model.whole_on == "rank_zero"

    def write_filled(
        self,
        states: Sequence[UnfilledState],
        make: Callable[[], Any],
        opened: Callable[[], AbstractContextManager[BinaryIO]],
        *,
        doing: str,
    ) -> None:
        """Write an object that has the tensors of ``states`` by ``torch.save``, one tensor at a time. Collective.

        See :func:`~smp_strategy.checkpoint.torch_file.write_torch_file`.
        """
        with self._parts.views.put_aside():
            write_torch_file(states, make, opened, doing=doing)

    def write_full_checkpoint(self, states: Sequence[UnfilledState], content: Mapping[str, Any], path: Any) -> None:
        """Write ``content``, which has the tensors of ``states``, to the file ``path``, atomically. Collective.

        Raises:
            CheckpointError: it could not be written. The previous file is still there.
            PeerFailedError: global rank 0 could not write it.
        """
        opened = partial(replacing_full, local_path(path))
        self.write_filled(states, lambda: content, opened, doing=f"saving {path}")

    def write_full_optimizer_state(self, optimizer: Optimizer, path: Path) -> None:
        """Write what :meth:`full_optimizer_state` returns to ``path`` on global rank 0, atomically, one tensor at a
        time. Collective.

        Raises:
            PeerFailedError: global rank 0 could not write.
        """
        unfilled: list[UnfilledState] = []
        if self._parts.local_model is None or optimizer in self._parts.pending.optimizers:
            make = partial(self.full_optimizer_state, optimizer)
        else:
            with self._parts.views.put_aside():
                unfilled.append(UnfilledState(full.spread_optimizer_state(self._parts.local_model.holdings, optimizer)))
            make = partial(full.whole_optimizer_state_dict, optimizer, unfilled[0].entries())
        self.write_filled(unfilled, make, partial(replacing_full, path), doing="saving the state of an optimizer")

    # As a whole

    # Entries are made by the argument `take`: it gathers them, unless it promises to do so later.

    def full_state_dict(self, take: full.Take | None = None) -> dict[str, Any]:
        """State dict of the full module on global rank 0; an empty one elsewhere. Collective."""
        assert self._parts.module is not None
        self._parts.delayed.refuse_saving()
        if self._parts.local_model is not None:
            with self._parts.views.put_aside():
                return self._parts.local_model.full_state_dict(take or full.collect)
        return self._parts.module.state_dict() if self.is_first else {}

    def full_values(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of these parameters and buffers, by their first names, on global rank 0; ``{}`` elsewhere. Collective.

        Unlike :meth:`full_state_dict` it knows buffers that are not persistent, and nothing of the user's hooks.
        """
        module, local_model = self._parts.module, self._parts.local_model
        assert module is not None
        if local_model is None or local_model.whole_on != "none":
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            return {name: tensors[name].detach() for name in names} if self.is_first else {}
        with self._parts.views.put_aside():
            local_model.settle()
            return full.collect(named_state(local_model.holdings, names))

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0, which gets full states."""
        return self._parts.mesh.rank == 0

    @contextmanager
    def looking_plain(self) -> Iterator[None]:
        """Context between steps in which modules look as before a run; their values stay as they are. Collective."""
        local_model, split = self._parts.local_model, self._parts.layout.split
        with ExitStack() as stack:
            stack.enter_context(self._parts.views.put_aside())
            stack.enter_context(self._parts.calls.lifted())
            if local_model is not None and not local_model.is_whole_here:
                stack.enter_context(split.appearance.dense())
            yield

    @contextmanager
    def looking_as_built(self) -> Iterator[None]:
        """Context for set-up code in which modules look as before the first run; uses of absent values are refused."""
        with ExitStack() as stack:
            stack.enter_context(self.looking_plain())
            if self._parts.is_spread:
                stack.enter_context(self._parts.layout.split.whole_sizes())
            yield

    def full_optimizer_state(self, optimizer: Optimizer, take: full.Take | None = None) -> dict[str, Any]:
        """Full ``optimizer.state_dict()`` on global rank 0; ``{}`` elsewhere. Collective."""
        local_model, is_pending = self._parts.local_model, optimizer in self._parts.pending.optimizers
        if local_model is None or is_pending:  # global rank 0 has all of it
            if not self.is_first:
                return {}
            return self._parts.pending.whole(optimizer) if is_pending else optimizer.state_dict()
        with self._parts.views.put_aside():  # on all ranks: it is collective
            entries = (take or full.collect)(full.spread_optimizer_state(local_model.holdings, optimizer))
            return full.whole_optimizer_state_dict(optimizer, entries) if self.is_first else {}

    def full_gradients(self, take: full.Take | None = None) -> dict[str, Tensor]:
        """Full accumulated gradients on global rank 0; ``{}`` elsewhere. Collective.

        They are summed up over ranks first; see :meth:`held_state`.
        """
        if self._parts.local_model is None:
            return {}
        self._parts.reduce_gradients()
        with self._parts.views.put_aside():
            return dict((take or full.collect)(SpreadState(gradient_state(self._parts.local_model.holdings), ())))

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a full state dict; this rank keeps its part."""
        if self._parts.local_model is None:
            assert self._parts.module is not None
            self._parts.module.load_state_dict(state_dict, strict=strict)
        else:
            with self._parts.views.put_aside():
                self._parts.local_model.load_state_dict(state_dict, strict=strict)

    def load_edited(self, state_dict: dict[str, Any], *, strict: bool) -> None:
        """Load a full state dict that hooks may have edited; a rank reads its part of what nobody has read."""
        assert self._parts.module is not None
        is_unread = any(isinstance(value, DeferredTensor) for value in state_dict.values())
        is_delayed = any(lacks_values(parameter) for parameter in self._parts.module.parameters())
        if is_unread and (self._parts.is_spread or is_delayed):
            self.load_stored(EditedState({MODULE: state_dict}), strict=strict)
        else:
            self.load_state_dict(state_dict, strict=strict)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a full optimizer state dict; this rank keeps its part, from the first step on."""
        source, names = full.numbered(state), full.numbers_of(optimizer)
        load_groups(optimizer, source, 0, names)
        self._load_optimizer(optimizer, source, 0, names)

    def load_gradients(self, state: Mapping[str, Tensor]) -> None:
        """Load full accumulated gradients; this rank keeps its part."""
        self.load_stored_gradients(WholeState({f"{GRADIENTS}.{name}": value for name, value in state.items()}))

    def state_dict(self) -> dict[str, int]:
        """Counters of the engine's random streams."""
        return {
            "seed": self._parts.seed,
            "num_steps": self._parts.num_steps,
            "num_evaluations": self._parts.num_evaluations,
        }

    def load_state(self, state: dict[str, int]) -> None:
        """Load these counters, to continue the random streams of another run."""
        self._parts.seed, self._parts.num_steps = state["seed"], state["num_steps"]
        self._parts.num_evaluations = state.get("num_evaluations", 0)  # older checkpoints have none


def _as_source(given: Source | Mapping[str, Any]) -> Source:
    return EditedState(given) if isinstance(given, Mapping) else given
