"""Which of the models that a script prepares is spread over the ranks: the one that is trained.

Others are kept whole on every rank: criteria without parameters, and models that are evaluated only, a teacher, say.
Nothing says for sure what a model is for when it is prepared; a frozen one, or one in evaluation mode that no known
optimizer trains, is spread until one comes that is trained.
"""

from collections.abc import Iterable, Sequence
from typing import final

from torch import nn
from torch.optim import Optimizer

__all__ = ["Place"]


@final
class Place:
    """Of the model that is spread.

    Attributes:
        chosen: the model that is to be spread, out of those that are prepared together.
        others: models that are whole on every rank.
    """

    def __init__(self) -> None:
        self.chosen: nn.Module | None = None
        self.others: list[nn.Module] = []
        self._evaluated: list[nn.Module] = []
        self._coming: list[Optimizer] = []

    def clear(self) -> None:
        """Nothing is prepared any more."""
        self.chosen = None
        for each in (self.others, self._evaluated, self._coming):
            each.clear()

    def begin(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], prepared: Iterable[Optimizer]
    ) -> None:
        """``models`` and ``optimizers`` are about to be prepared, beside optimizers that are ``prepared``."""
        self._coming = list(optimizers)
        known = [*prepared, *optimizers]
        wanting = [model for model in models if not self.may_stay_whole(model, prepared)]
        trained = [model for model in wanting if _is_trained_by(known, model)]
        for candidates in (trained, wanting):
            if len(candidates) == 1:
                self.chosen = candidates[0]
                return

    def evaluates(self, model: nn.Module) -> None:
        """The script says that ``model`` is not trained."""
        self._evaluated.append(model)

    def may_stay_whole(self, model: nn.Module, prepared: Iterable[Optimizer]) -> bool:
        """Whether ``model`` need not be spread, as far as one knows, with the optimizers that are ``prepared``."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return True
        known = [*prepared, *self._coming]
        is_evaluated = any(model is each for each in self._evaluated)
        return is_evaluated or (not model.training and not _is_trained_by(known, model))

    def other_of(self, optimizer: Optimizer) -> nn.Module | None:
        """One of :attr:`others` that ``optimizer`` trains, if there is one."""
        return next((model for model in self.others if _is_trained_by([optimizer], model)), None)


def _is_trained_by(optimizers: Iterable[Optimizer], model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(
        id(each) in own for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]
    )
