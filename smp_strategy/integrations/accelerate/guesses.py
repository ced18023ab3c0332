"""What a training step is told about the backward that will follow it.

A call of the model computes gradients, and the script says later what they are multiplied by, what they are added to
and whether they are the last before an optimizer's step. Right guesses give the additions of one process, in number
and order; wrong ones give the same sums, rounded otherwise. Scripts do the same again and again, so what was found to
be true of one call is the guess for the next.
"""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn

__all__ = ["Guesses"]


@final
class Guesses:
    """See the module docstring.

    Args:
        scale: what losses are multiplied by beside what the script does (float16).
        window: calls whose gradients are probably added up; the first guess for what losses are divided by.
        syncs: whether the script says that this call's gradients are the last ones.
    """

    def __init__(self, scale: Callable[[], float], window: Callable[[], int], syncs: Callable[[], bool]) -> None:
        self._scale = scale
        self._window = window
        self._syncs = syncs
        self._seen: dict[int, float] = {}
        self._zeroes_between = False

    def factor(self) -> float:
        """What the loss will be multiplied by before its backward."""
        window = self._window()
        return self._scale() * self._seen.get(window, 1 / window)

    def continues(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether gradients will be added to those that there are."""
        return not self._zeroes_between and _have_gradients(parameters)

    def reduces(self) -> bool:
        """Whether replicas will average the gradients when they are handed over."""
        return self._syncs()

    def learn(self, grad_output: Tensor, factor: float, parameters: Sequence[nn.Parameter], *, had: bool) -> None:
        """Backward has come.

        Args:
            grad_output: what the loss was multiplied by.
            factor: the guess for it.
            parameters: as they are just before gradients are added to them.
            had: whether they had gradients when the model was called.
        """
        given = grad_output.item()
        if given and given != grad_output.new_tensor(factor).item():
            self._seen[self._window()] = given / self._scale()
        if had:
            self._zeroes_between = not _have_gradients(parameters)


def _have_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)
