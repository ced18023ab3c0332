"""Streamed saves: the file of a full checkpoint is filled tensor by tensor, and no rank ever has the whole state.

Lightning makes one dict, and gives it to hooks before it is written. Where no hook gets it, nobody looks at values.
The dict then has tensors without values on global rank 0, which its file gets from all ranks, one after the other
(:mod:`smp_strategy.checkpoint.torch_file`)::

    Trainer.save_checkpoint       patched: remembers the path
      lightning_module_state_dict   decides; the tensors of the dict have no values
      optimizer_state               likewise, per optimizer
      save_checkpoint               lays the file out, and fills it

Everybody else who calls the strategy gets values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from torch.optim import Optimizer

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.checkpointing import promised_to
from smp_strategy.integrations.lightning.tree import Tree

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy

__all__ = ["StreamedSaves"]

_OURS: Final = "smp_strategy."


class _Request(NamedTuple):
    """Call of ``Trainer.save_checkpoint``."""

    trainer: Any
    path: Any
    storage_options: Any


@final
class StreamedSaves:
    """Streamed saves of one strategy.

    ``is_plain_file`` says whether this package writes a path itself, as a file, with these storage options.
    """

    def __init__(
        self,
        strategy: "ParallelStrategy",
        tree: Tree,
        engine: Callable[[], Engine],
        is_plain_file: Callable[[Any, Any], bool],
    ) -> None:
        self._strategy = strategy
        self._tree = tree
        self._engine = engine
        self._is_plain_file = is_plain_file
        self._request: _Request | None = None
        self._states: list[Any] | None = None  # gathered when the file is written
        self._served: set[int] = set()
        self._is_in_hook = False

    def install(self, trainer: Any) -> None:
        """Patch ``trainer.save_checkpoint``, also for calls after the run, when the module may still be spread."""
        if "save_checkpoint" in vars(trainer) or not self._are_known(trainer, "save_checkpoint"):
            return
        original = type(trainer).save_checkpoint

        @wraps(original)
        def save_checkpoint(
            called: Any, filepath: Any, weights_only: bool | None = None, storage_options: Any = None
        ) -> None:
            with self._requested(_Request(called, filepath, storage_options)):
                original(called, filepath, weights_only, storage_options)

        trainer.save_checkpoint = MethodType(save_checkpoint, trainer)

    @contextmanager
    def _requested(self, request: _Request) -> Iterator[None]:
        self._request = request
        try:
            yield
        finally:
            self._request = self._states = None
            self._served.clear()

    @contextmanager
    def with_values(self) -> Iterator[None]:
        """Context of a user's hook during a save: what it asks the strategy for has values."""
        before, self._is_in_hook = self._is_in_hook, True
        try:
            yield
        finally:
            self._is_in_hook = before

    @property
    def is_on(self) -> bool:
        """Whether the checkpoint that is being made has tensors without values."""
        return self._states is not None

    def state_dict(self) -> dict[str, Any]:
        """All weights on global rank 0, none elsewhere; without values for a streamed save. Collective."""
        is_streamed = self._begins()
        if is_streamed:
            self._states = []
        return self._engine().saved.full_state_dict(self._take(is_streamed))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of an optimizer, like :meth:`state_dict`. Collective."""
        is_streamed = self.is_on and not self._is_in_hook and id(optimizer) not in self._served
        if is_streamed:
            self._served.add(id(optimizer))
        return self._engine().saved.full_optimizer_state(optimizer, self._take(is_streamed))

    def gradients(self) -> dict[str, Any]:
        """Accumulated gradients, like :meth:`state_dict`. Collective."""
        return self._engine().saved.full_gradients(self._take(self.is_on))

    def _take(self, is_streamed: bool) -> Any:
        return promised_to(self._states) if is_streamed and self._states is not None else None

    def give_up(self) -> None:
        """Make the rest of the save an ordinary one, whose dict has values."""
        self._request = self._states = None

    def write(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Write ``checkpoint`` of global rank 0 as :func:`~smp_strategy.checkpoint.storage.full_file.write_full`.

        Collective. The previous file is still there after an error.
        """
        assert self._states is not None
        self._engine().saved.write_full_checkpoint(self._states, checkpoint, path)

    def _begins(self) -> bool:
        """Whether the weights that are asked for are the first entry of a streamed save. Collective."""
        if self._states is not None or self._is_in_hook or not self._engine().saved.is_partitioned:
            return False
        request = self._request
        is_possible = (
            request is not None
            and self._is_plain_file(request.path, request.storage_options)
            and not self._is_looked_at(request.trainer)
        )
        return bool(self._strategy.broadcast(is_possible))

    def _is_looked_at(self, trainer: Any) -> bool:
        """Whether code of the user may get the dict, or may ask for values in the midst of a save, unseen."""
        is_overridden = partial(self._tree.pytorch("utilities.model_helpers").is_overridden, "on_save_checkpoint")
        module_class = self._tree.pytorch("core.module").LightningModule
        callback_class = self._tree.pytorch("callbacks.callback").Callback
        if is_overridden(trainer.lightning_module, parent=module_class):
            return True
        if any(is_overridden(callback, parent=callback_class) for callback in trainer.callbacks):
            return True
        # During a run those of the user are patched, see `with_values`.
        if not all(self._are_known(callback, "state_dict", most=1) for callback in trainer.callbacks):
            return True
        strategy, connector = self._strategy, trainer._checkpoint_connector
        called = [
            *((strategy, name) for name in ("lightning_module_state_dict", "optimizer_state", "save_checkpoint")),
            *((connector, name) for name in ("dump_checkpoint", "_get_lightning_module_state_dict")),
            (strategy.precision_plugin, "on_save_checkpoint"),
        ]
        return not all(self._are_known(owner, name) for owner, name in called)

    def _are_known(self, owner: Any, name: str, most: int | None = None) -> bool:
        """Whether the method ``name`` of ``owner``, and those that it overrides, are Lightning's or of this package.

        ``most``: number of definitions to look at; 1: those that it overrides do not count.
        """
        found = [vars(each)[name] for each in (owner, *type(owner).__mro__) if name in vars(each)]
        known = _OURS, f"{self._tree.root}."
        return all(str(getattr(each, "__module__", "")).startswith(known) for each in found[:most])
