"""Gradients are out of reach for the microbatches of a step that computes them itself.

Under manual optimization the parameters' gradients exist while the user's code runs, once per microbatch and on each
stage a part. Code that reads or changes them there would do so several times, and with a part only. So whenever a
microbatch has its turn, ``.grad`` is a stand-in that tells what to do instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError

__all__ = ["HiddenGradients"]


@final
class HiddenGradients:
    """Hides the gradients of ``parameters``, and shows them for a while.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._real: list[tuple[nn.Parameter, Tensor, _StandIn]] = []

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """They are hidden while this is open."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside of :meth:`hidden`: they are shown while this is open."""
        self._show()
        try:
            yield
        finally:
            self._hide()

    def _hide(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                stand_in = _StandIn(parameter.grad)
                self._real.append((parameter, parameter.grad, stand_in))
                parameter.grad = stand_in

    def _show(self) -> None:
        for parameter, gradient, stand_in in self._real:
            if parameter.grad is stand_in:  # else the user has set it to None
                parameter.grad = gradient
        self._real.clear()


class _StandIn(Tensor):
    """Has the metadata of a gradient, which is all that ``.grad =`` asks for."""

    @staticmethod
    def __new__(cls, gradient: Tensor) -> "_StandIn":
        made: _StandIn = Tensor._make_wrapper_subclass(
            cls, gradient.size(), strides=gradient.stride(), dtype=gradient.dtype, device=gradient.device
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(
            f"`{getattr(func, '__name__', func)}` of a gradient in a training step, which runs once per microbatch and "
            "on every stage. Call `self.clip_gradients(optimizer, ...)` or `optimizer.zero_grad()`, or look at "
            "gradients in the hook `on_before_optimizer_step`."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.__torch_function__(func, types, args, kwargs)
