"""``save_pretrained``, ``push_to_hub`` and ``num_parameters`` of models of transformers and PEFT that are partitioned.

Scripts call ``model.save_pretrained(folder)`` on all ranks, with or without ``is_main_process``, and Hugging Face's
Trainer calls it for checkpoints and for ``save_model``. The method is replaced on the instance: that which Accelerate
prepares, and those in a LightningModule, also after the run. While the model is whole it behaves as usual, also on a
single rank. Once the model is partitioned the call is collective, and all ranks write
(:mod:`smp_strategy.engine.saving.saved_models.spread_saving`). On one rank alone it raises an error
(:mod:`smp_strategy.distributed.rendezvous`).

The model's own method runs on a gathered state dict, as it always did, if the caller gives one, if values are needed
before files are written (pickled files, uploads to the Hub, quantised weights), or if it is that of another library.

``push_to_hub`` saves in this way, too, and uploads from the first rank only.

Scripts also save ``model.state_dict()`` on all ranks, and load by ``model.load_state_dict``. Accelerate's door has
:class:`StateDictCalls` in their place. While the model is whole they behave as usual. Once it is partitioned the first
gathers the full state dict, and the second takes this rank's shard of its argument.

``num_parameters``, which goes into the index of several files and into the operations that Hugging Face's Trainer
counts, is that of the whole model, although a rank has parts of split layers.
"""

import inspect
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final, final

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.rendezvous import alike, meet
from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.engine.saving.saved_models.spread_saving import FileNotes, SpreadModel, write_together
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.patching import Patches

__all__ = ["PretrainedCalls", "StateDictCalls", "library_of", "pretrained_parts"]

# Arguments for which values are needed while the library prepares the files, with the value for which they are not.
_NEEDS_VALUES = {
    "push_to_hub": False,
    "distributed_checkpoint": False,
    "safe_serialization": True,
}
_CONVERSION = "path_initial_model_for_weight_conversion"
_CARD = "README.md"
# Names of the collective calls.
_WRITTEN: Final = "model.save_pretrained"
_GATHERED: Final = "model.save_pretrained, which needs values"
_UPLOAD: Final = "model.push_to_hub"


def library_of(model: nn.Module) -> ModuleType | None:
    """The module of transformers or PEFT whose ``save_pretrained`` is that of ``model``; ``None``: another one's."""
    for name, kind in (("peft.peft_model", "PeftModel"), ("transformers.modeling_utils", "PreTrainedModel")):
        library = sys.modules.get(name)
        if library is not None and isinstance(model, getattr(library, kind)):
            own = getattr(library, kind).save_pretrained
            return library if getattr(type(model), "save_pretrained", None) is own else None
    return None


def pretrained_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in ``model`` that have ``save_pretrained``, itself included, with their names in it."""
    return ((name, part) for name, part in model.named_modules() if callable(getattr(part, "save_pretrained", None)))


@final
class PretrainedCalls:
    """Replacement of ``save_pretrained``, ``push_to_hub`` and ``num_parameters`` of one model.

    Args:
        model: Model of transformers or of PEFT, or another one with ``save_pretrained``.
        spread: Returns the partitioned model, or ``None`` while this rank has all of it.
        whole_sizes: Makes a context in which its parameters have the sizes of the whole model.
        together: Makes a context of a call of all ranks, which another rank also makes by :meth:`take_part`.
    """

    def __init__(
        self,
        model: nn.Module,
        spread: Callable[[], SpreadModel | None],
        whole_sizes: Callable[[], AbstractContextManager[None]],
        *,
        together: Callable[[str], AbstractContextManager[None]] = lambda call: nullcontext(),
    ) -> None:
        self._together = together
        self.model = model
        self._spread = spread
        self._whole_sizes = whole_sizes
        self._patches = Patches()
        self._library = library_of(model)
        self._own: Callable[..., None] = model.save_pretrained  # type: ignore[assignment]
        self._patches.replace(model, self._save_pretrained, "save_pretrained")
        if self._library is not None:
            self._own_push: Callable[..., Any] = model.push_to_hub  # type: ignore[assignment]
            self._patches.replace(model, self._push_to_hub, "push_to_hub")
            if hasattr(model, "num_parameters"):
                self._own_count: Callable[..., int] = model.num_parameters  # type: ignore[assignment]
                self._patches.replace(model, self._num_parameters, "num_parameters")

    def remove(self) -> None:
        """Restore the model's own methods."""
        self._patches.give_back()

    @property
    def are_collective(self) -> bool:
        """Whether all ranks have to call ``save_pretrained`` together now."""
        return self._library is not None and self._spread() is not None

    def _save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        spread = self._spread()
        if spread is None:
            self._own(save_directory, *arguments, **options)
            return
        if spread.is_whole_on_first or self._library is None:
            self._save_on_first(spread, save_directory, *arguments, **options)
            return
        names = list(inspect.signature(self._own).parameters)[1:]
        options |= dict(zip(names, arguments, strict=False))
        if options.get(_CONVERSION) is not None:
            raise UnsupportedError(
                f"`save_pretrained({_CONVERSION}={options[_CONVERSION]!r})` loads the initial adapter into the model, "
                "which is spread over ranks, and computes with its weights. Call it when every rank has the whole "
                f'model: with `restore_module="all"`, after {door_words().end_of_run}.'
            )
        if options.get("state_dict") is not None:
            with self._parts_give_names():
                self._own(save_directory, **options)  # perhaps on one rank only
            return
        if self._needs_values(options):
            with self._together(_GATHERED):
                state = spread.gathered()
                with alike("saving a model"):
                    self._own(save_directory, **{**options, "state_dict": state})
            return
        is_main = options.pop("is_main_process", True)
        options.pop("state_dict", None)
        is_adapter = self._is_adapter or getattr(self.model, "_hf_peft_config_loaded", False)
        replaces = "" if is_adapter else folders.weights_of(options.get("variant"))

        def plan(staging: Path, entries: dict[str, Any]) -> FileNotes:
            return self._plan(Path(save_directory), staging, entries, options)

        target = Path(save_directory) if is_main else None
        with self._together(_WRITTEN):
            write_together(_WRITTEN, spread, target, plan, replaces=replaces)

    def take_part(self, call: str) -> None:
        """Make a ``call`` of the main process with it. Collective."""
        spread = self._spread()
        assert spread is not None
        if call == _UPLOAD:
            self._push_to_hub()
        elif call == _WRITTEN:
            write_together(_WRITTEN, spread, None, lambda *_: FileNotes(Path()))
        else:
            spread.gathered()
            with alike("saving a model"):
                pass

    def _save_on_first(self, spread: SpreadModel, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """Save by the model's own method on global rank 0. Collective, unless that rank has the whole model."""
        if spread.is_whole_on_first:
            if dist.get_rank() == 0:
                self._own(save_directory, *arguments, **options)
            return
        meet(_WRITTEN)
        state = spread.gathered_on_first()
        with alike(f"saving to {save_directory}"), Patches() as patches:
            if dist.get_rank() == 0:
                patches.put(self.model, "state_dict", lambda *_, **__: state)
                self._own(save_directory, *arguments, **options)

    def _push_to_hub(self, *arguments: Any, **options: Any) -> Any:
        """Save on all ranks, and upload from the first one, which other ranks wait for. Collective."""
        if self._spread() is None:
            return self._own_push(*arguments, **options)
        with self._together(_UPLOAD):
            return self._uploaded(*arguments, **options)

    def _uploaded(self, *arguments: Any, **options: Any) -> Any:
        is_first, uploaded = dist.get_rank() == 0, None
        sizes = {name: options[name] for name in ("max_shard_size",) if name in options}
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            self._save_pretrained(folder, is_main_process=is_first, **sizes)
            with alike("uploading a model"):
                if is_first:
                    copy = partial(shutil.copytree, folder, dirs_exist_ok=True, copy_function=shutil.move)
                    patches = stack.enter_context(Patches())
                    patches.put(self.model, "save_pretrained", lambda target, **_: copy(target))
                    uploaded = self._own_push(*arguments, **options)
        return collectives.tell(uploaded, 0, "the result of an upload")

    def _num_parameters(self, *arguments: Any, **options: Any) -> int:
        with self._whole_sizes():
            return self._own_count(*arguments, **options)

    @property
    def _is_adapter(self) -> bool:
        return self._library is not None and self._library.__name__.startswith("peft.")

    def _needs_values(self, options: dict[str, Any]) -> bool:
        is_quantised = getattr(self.model, "hf_quantizer", None) is not None
        return is_quantised or any(options.get(name, usual) != usual for name, usual in _NEEDS_VALUES.items())

    def _plan(self, target: Path, staging: Path, entries: dict[str, Any], options: dict[str, Any]) -> FileNotes:
        """Let the library prepare all files; those of tensors are noted."""
        notes = FileNotes(staging)
        with self._parts_give_names(), self._counted(entries), notes.instead_of(self._library, "safe_save_file"):
            if self._is_adapter and (target / _CARD).is_file():  # which the user may have edited, and PEFT completes
                shutil.copyfile(target / _CARD, staging / _CARD)
            self._own(str(staging), state_dict=entries, is_main_process=True, **options)
        return notes

    @contextmanager
    def _counted(self, entries: Mapping[str, Any]) -> Iterator[None]:
        """Context in which one rank may ask for ``num_parameters``; outside of it all do, in a hook."""
        with Patches() as patches:
            if hasattr(self.model, "num_parameters"):
                number = sum(entries.get(name, own).numel() for name, own in self.model.named_parameters())
                patches.put(self.model, "num_parameters", lambda: number)
            yield

    @contextmanager
    def _parts_give_names(self) -> Iterator[None]:
        """Context in which PEFT may ask modules that it saves whole (`modules_to_save`) for the names of weights."""
        with Patches() as patches:
            for part in self.model.modules():
                if part is not self.model:
                    patches.put(part, "state_dict", partial(_without_values, part.state_dict))
            yield


def _without_values(state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """State dict of a submodule with the parameters themselves, which a rank may lack the values of."""
    return state_dict(*args, **{**kwargs, "keep_vars": True})


@final
class StateDictCalls:
    """Replacement of ``state_dict`` and ``load_state_dict`` of one model.

    Args:
        model: whole until now.
        is_partitioned: whether this rank lacks a part of it.
        collect: returns the full state dict. Collective. Like ``load`` it calls the methods :meth:`aside`.
        load: loads this rank's shard of a full state dict; returns the missing and the unexpected names.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_partitioned: Callable[[], bool],
        collect: Callable[[], Mapping[str, Any]],
        load: Callable[..., tuple[list[str], list[str]]],
    ) -> None:
        self.model = model
        self._is_partitioned = is_partitioned
        self._collect = collect
        self._load = load
        self._own_state_dict, self._own_load_state_dict = model.state_dict, model.load_state_dict
        self._collected: Mapping[str, Any] | None = None
        self._is_aside = False
        self._patches = Patches()
        self._patches.replace(model, self._state_dict, "state_dict")
        self._patches.replace(model, self._load_state_dict, "load_state_dict")

    def remove(self) -> None:
        """Restore the model's own methods."""
        self._patches.give_back()

    @contextmanager
    def collected(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Context in which ``state``, gathered by all ranks together, is the result; each rank may ask for it alone."""
        self._collected = OrderedDict(state)  # a copy: callers may remove entries
        self._collected._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._collected = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which the model's own methods run: shards are gathered, or loaded."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    def _state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        # `keep_vars` asks for the parameters themselves, and not for their values.
        if keep_vars or self._is_aside or args or not self._is_partitioned():
            options = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
            return self._own_state_dict(*args, **({} if args else options))
        state = self._collect() if self._collected is None else self._collected
        found: Any = OrderedDict() if destination is None else destination
        found.update({prefix + name: value for name, value in state.items()})
        if destination is None:
            found._metadata = getattr(state, "_metadata", OrderedDict())
        return found

    def _load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self._is_aside or not self._is_partitioned():
            return self._own_load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            raise UnsupportedError(
                "`load_state_dict(assign=True)` would replace parameters, which are spread over the ranks. Leave "
                "`assign` out: values are copied into them."
            )
        return _IncompatibleKeys(*self._load(state_dict, strict=strict))
