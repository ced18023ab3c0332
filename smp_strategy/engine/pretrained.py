"""Pretrained models of Hugging Face under ``delayed_parameter_initialization``: values are read after the partition.

``from_pretrained`` of transformers builds a model on the meta device, then renames, merges, casts and ties the tensors
of the files. Under the option these tensors are deferred (:mod:`smp_strategy.model.deferred_tensor`), so transformers'
own code does all of this without values, and each rank reads what it holds after the partition. What is missing in the
files transformers initialises as ever. Adapters of PEFT are small: they are made with values, on the CPU.

:mod:`smp_strategy.integrations.autoload` passes modules of both libraries to :func:`patch` when they have been
imported.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final
from unittest.mock import patch as replaced

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from smp_strategy.checkpoint.storage.weight_file import FileRuns
from smp_strategy.config.config import SMPConfig
from smp_strategy.config.variables import is_selected
from smp_strategy.errors import DamagedError, UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor, ReadRun, defer, lacks_values, undefer

__all__ = ["deferring", "has_values", "patch", "read_now", "set_deferring"]

TRANSFORMERS: Final = "transformers.modeling_utils"
PEFT: Final = "peft.tuners.tuners_utils"
PEFT_MODEL: Final = "peft.peft_model"
_CPU: Final = torch.device("cpu")
# `None` before there is an Accelerator, whose options may be in the environment.
_IS_DEFERRING: "Final[ContextVar[bool | None]]" = ContextVar("smp_deferring", default=None)


@contextmanager
def deferring() -> Iterator[None]:
    """Context in which ``from_pretrained`` defers values."""
    for name in (TRANSFORMERS, PEFT, PEFT_MODEL):
        if name in sys.modules:
            patch(sys.modules[name])
    token = _IS_DEFERRING.set(True)
    try:
        yield
    finally:
        _IS_DEFERRING.reset(token)


def set_deferring(value: bool) -> None:
    """Let ``from_pretrained`` defer values, or not, from now on."""
    _IS_DEFERRING.set(value)


def _is_deferring() -> bool:
    """Whether values are deferred: by a context, by an Accelerator, or by the options of ``accelerate launch``."""
    said = _IS_DEFERRING.get()
    if said is not None or not is_selected(os.environ):
        return bool(said)
    return SMPConfig.from_variables(os.environ).delayed_parameter_initialization


def has_values(root: nn.Module) -> bool:
    """Whether all parameters of ``root`` have values in memory."""
    return not any(map(lacks_values, root.parameters()))


def read_now(root: nn.Module) -> None:
    """Give all deferred tensors of ``root`` their values, in place."""
    for tensor in (*root.parameters(), *root.buffers()):
        if isinstance(tensor, DeferredTensor):
            undefer(tensor, read=True)


def patch(module: ModuleType) -> None:
    """Patch ``module``, one of those above, so that it obeys :func:`deferring`; a second call does nothing."""
    changes: dict[str, Callable[[Any], None]] = {
        TRANSFORMERS: _patch_transformers,
        PEFT: lambda module: _on_the_cpu(module.BaseTuner, "inject_adapter"),
        PEFT_MODEL: lambda module: _on_the_cpu(module.PeftModel, "__init__", "add_adapter", "load_adapter"),
    }
    if not hasattr(module, "_smp_defers"):
        module._smp_defers = True  # type: ignore[attr-defined]
        changes[module.__name__](module)


def _patch_transformers(module: Any) -> None:
    original = vars(module.PreTrainedModel)["from_pretrained"].__func__
    load_state_dict = module.load_state_dict

    def load_deferred(file: Any, map_location: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        state = load_state_dict(file, map_location, *args, **kwargs)
        if str(map_location) == "meta":
            return state
        runs = FileRuns(Path(file))
        return {name: _mapped(runs, tensor) for name, tensor in state.items()}

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_deferring():
            return original(cls, *args, **kwargs)
        _refuse_placed(kwargs)
        if "disable_mmap" in kwargs:
            kwargs["disable_mmap"] = False  # nothing is mapped, and transformers would read whole files instead
        with (
            _CPU,  # transformers refuses to load in the context of the meta device
            replaced.object(module, "safe_open", _DeferredFile),
            replaced.object(module, "load_state_dict", load_deferred),
        ):
            return original(cls, *args, **kwargs)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _on_the_cpu(kind: Any, *names: str) -> None:
    """Let methods of ``kind`` make tensors on the CPU although the context of a deferred model is the meta device."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            with _CPU if _is_deferring() else nullcontext():
                return original(*args, **kwargs)

        return method

    for name in names:
        setattr(kind, name, wrapped(getattr(kind, name)))


def _refuse_placed(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in ("device_map", "quantization_config", "gguf_file", "tp_plan", "distributed_config") and value:
            raise UnsupportedError(
                f"`from_pretrained({name}={value!r})` under `delayed_parameter_initialization`: the layout decides "
                f"which rank reads which weight, in the dtype of the argument `dtype`. Leave `{name}` out, or set "
                "`delayed_parameter_initialization=False`, with which every rank loads the whole model."
            )


@final
class _DeferredFile:
    """A safetensors file whose tensors are deferred; with the methods of ``safe_open`` that transformers calls."""

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", backend: str = "pread") -> None:
        self._name = os.fspath(filename)
        # Not mapped: pages that have been read would stay in the resident set beside the tensors.
        with self._named():
            self._file: Any = safe_open(filename, framework=framework, device="cpu", backend="pread")
            self._runs = FileRuns(Path(filename))
            self._places = self._runs.safetensors()

    def keys(self) -> list[str]:
        """Names of the tensors."""
        names: list[str] = self._file.keys()
        return names

    def metadata(self) -> Any:
        return self._file.metadata()

    def get_slice(self, name: str) -> "_DeferredSlice":
        """The tensor ``name``, not read."""
        place, num_bytes = self._places[name]
        return _DeferredSlice(
            self._file.get_slice(name),
            functools.partial(self._read, name),
            num_bytes,
            functools.partial(self._runs.read, place),
        )

    def get_tensor(self, name: str) -> Tensor:
        """The tensor ``name``, not read."""
        return self.get_slice(name)[...]

    def _read(self, name: str) -> Tensor:
        with self._named(f" of `{name}`"):
            values: Tensor = self._file.get_tensor(name)
            return values

    @contextmanager
    def _named(self, what: str = "") -> Iterator[None]:
        """Context that adds the name of the file to its errors."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise DamagedError(
                f"{self._name}{what} cannot be read: {error}. The file is damaged, missing, or not written to its end. "
                "Download or save it again."
            ) from error

    def __enter__(self) -> "_DeferredFile":
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: the file is closed with the last of its tensors."""


@final
class _DeferredSlice:
    """Tensor of a file, as ``get_slice`` gives it."""

    def __init__(
        self,
        stored: Any,
        read: Callable[[], Tensor],
        num_bytes: int,
        read_run: Callable[[torch.dtype, int, int], Tensor],
    ) -> None:
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype
        self._read, self._num_bytes, self._read_run = read, num_bytes, read_run

    def __getitem__(self, index: Any) -> Tensor:
        dtype = sys.modules[TRANSFORMERS].str_to_torch_dtype[self.get_dtype()]
        like = torch.empty(self.get_shape(), dtype=dtype, device="meta")
        if self._num_bytes != like.nbytes:  # elements of less than a byte
            return defer(like, _CPU, self._read)[index]
        return _of_runs(like, functools.partial(self._read_run, dtype))[index]


def _mapped(runs: FileRuns, tensor: Tensor) -> Tensor:
    """Deferred copy of ``tensor``, which is mapped from a file."""
    like = torch.empty_like(tensor, device="meta")
    place = runs.mapped(tensor) if tensor.is_contiguous() else None
    if place is None:
        return defer(like, _CPU, tensor.clone)
    return _of_runs(like, functools.partial(runs.read, place, tensor.dtype))


def _of_runs(like: Tensor, read: ReadRun) -> Tensor:
    return defer(like, _CPU, lambda: read(0, like.numel()).view(like.shape), read)
