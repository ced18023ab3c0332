"""Switches of PyTorch as a mapping: ``requires_grad`` of parameters, and process-wide settings.

Grad mode, autocast and inference mode are not here: they are thread-local, and each microbatch has its own thread.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import nn
from torch.backends import cuda

from smp_strategy.distributed.torch_private import plain_functions, plain_functions_and_modes

__all__ = ["TorchSwitches"]

_REQUIRES_GRAD = attrgetter("requires_grad")


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


# Process-wide settings that change results.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "memory-efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "attention by products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "attention of cuDNN": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}


@final
class TorchSwitches(MutableMapping[Any, Any]):
    """Settings by their names, and ``requires_grad`` of parameters by their numbers."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Take the current values as reference for :meth:`changed`."""
        self._before = self._now()

    def changed(self) -> list[tuple[Any, Any]]:
        """Names of changed values, with the values before."""
        now = self._now()
        if now == self._before:
            return []
        rows = zip(self, self._before, now, strict=True)
        return [(name, before) for name, before, value in rows if value != before]

    def _now(self) -> tuple[Any, ...]:
        with plain_functions_and_modes():  # parameters of other stages are a subclass, and a dry run has modes
            return (*map(_REQUIRES_GRAD, self._parameters), *[get() for get, _ in _SETTINGS.values()])

    def __iter__(self) -> Iterator[Any]:
        return iter((*range(len(self._parameters)), *_SETTINGS))

    def __len__(self) -> int:
        return len(self._parameters) + len(_SETTINGS)

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, str):
            return _SETTINGS[name][0]()
        with plain_functions():
            return self._parameters[name].requires_grad

    def __setitem__(self, name: Any, value: Any) -> None:
        if isinstance(name, str):
            _SETTINGS[name][1](value)
            return
        with plain_functions():
            self._parameters[name].requires_grad_(value)

    def __delitem__(self, name: Any) -> None:
        raise AssertionError("switches always have a value")
