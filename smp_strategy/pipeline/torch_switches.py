"""Switches of PyTorch as mappings: ``requires_grad`` of parameters, and process-wide settings.

Both report their changes since the step began. Grad mode, autocast and inference mode are not here: they are
thread-local, and each microbatch has its own thread.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import nn
from torch.backends import cuda

from smp_strategy.distributed.torch_private import plain_functions, plain_functions_and_modes

__all__ = ["Frozen", "TorchSettings"]

_REQUIRES_GRAD = attrgetter("requires_grad")


class _Settings(MutableMapping[Any, Any]):
    """Mapping with fixed names whose values are queried all at once."""

    def __init__(self, names: Sequence[Any]) -> None:
        self._names = names
        self._before: tuple[Any, ...] = ()

    def values_of_now(self) -> tuple[Any, ...]:
        """Current values, in the order of the names."""
        raise NotImplementedError

    def begin(self) -> None:
        """Take the current values as reference for :meth:`changed`."""
        self._before = self.values_of_now()

    def changed(self) -> list[tuple[Any, Any]]:
        """Names of changed values, with the values before."""
        now = self.values_of_now()
        if now == self._before:
            return []
        rows = zip(self._names, self._before, now, strict=True)
        return [(name, before) for name, before, value in rows if value != before]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __delitem__(self, name: Any) -> None:
        raise AssertionError("settings always have a value")


@final
class Frozen(_Settings):
    """``requires_grad`` of parameters, by their numbers."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(range(len(parameters)))
        self._parameters = parameters

    def values_of_now(self) -> tuple[Any, ...]:
        """Current values, in the order of the parameters."""
        with plain_functions_and_modes():  # parameters of other stages are a subclass, and a dry run has modes
            return tuple(map(_REQUIRES_GRAD, self._parameters))

    def __getitem__(self, name: Any) -> Any:
        with plain_functions():
            return self._parameters[name].requires_grad

    def __setitem__(self, name: Any, value: Any) -> None:
        with plain_functions():
            self._parameters[name].requires_grad_(value)


@final
class TorchSettings(_Settings):
    """Process-wide settings of PyTorch that change results."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
            "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
            "deterministic algorithms": (_deterministic, _set_deterministic),
            "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
            "memory-efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
            "attention by products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
            "attention of cuDNN": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        }
        super().__init__(tuple(self._asked))
        self._getters = [get for get, _ in self._asked.values()]

    def values_of_now(self) -> tuple[Any, ...]:
        """Current values, in the order of the names."""
        return tuple([get() for get in self._getters])

    def __getitem__(self, name: Any) -> Any:
        return self._asked[name][0]()

    def __setitem__(self, name: Any, value: Any) -> None:
        self._asked[name][1](value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])
