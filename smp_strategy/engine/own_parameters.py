"""Tensors that an optimizer trains, but that are no parameters of the module that was distributed.

Gradients are collected, summed over stages, averaged over replicas and saved for the parameters that the module had
when it was distributed. An optimizer may have others: a temperature in a plain list, or a block that was appended after
some steps. They would get wrong gradients or none, and no error would tell. So each update begins with a comparison by
identity.
"""

import traceback
from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.sizes import show_count
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.ownership import home_of

__all__ = ["OwnParameters", "refusal_of_copy"]


@final
class OwnParameters:
    """Parameters of a module when it was distributed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        self._ids = set(map(id, self._parameters))

    def are_those_of_now(self) -> bool:
        """Whether the module has the same parameters, in the same order."""
        return list(map(id, self._module.parameters())) == list(map(id, self._parameters))

    def refuse_others(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse other tensors that ``optimizers`` train.

        Raises:
            UnsupportedError: there are some.
        """
        for optimizer in optimizers:
            trained = (each for group in optimizer.param_groups for each in group["params"])
            others = [each for each in trained if id(each) not in self._ids and each.requires_grad]
            if others:
                raise _refusal(optimizer, others, self._module)


def refusal_of_copy(error: RuntimeError) -> UnsupportedError | None:
    """Error in the place of PyTorch's about ``nn.Parameter(weight)`` with a distributed weight; ``None``: another one.

    PyTorch's names the class of the weight, which is of this package.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_code is not nn.Parameter.__new__.__code__:
        return None
    home = home_of(frames[-1].f_locals.get("data"))
    if home is None:
        return None
    return UnsupportedError(
        f"A hook makes a new parameter of `{home.name}` (as `parametrizations.weight_norm` does) after the first step, "
        "when parameters were distributed over the ranks: gradients of later ones would not be summed up or saved. Do "
        "so before training begins (in `__init__` or `configure_model`). A parametrization with one tensor "
        "(`spectral_norm`, one of your own) may come later."
    )


def _refusal(optimizer: Optimizer, others: Sequence[Tensor], module: nn.Module) -> UnsupportedError:
    name_of = {id(each): name for name, each in module.named_parameters()}
    names = [name_of[id(each)] for each in others if id(each) in name_of]
    kind = type(optimizer).__name__
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return UnsupportedError(
            f"{kind} trains `{names[0]}`{more}, which the module did not have in its first step, when its parameters "
            "were distributed over the ranks: gradients of later ones would not be summed up or saved. Make them "
            "before training begins, and freeze them (`requires_grad_(False)`) until they are needed."
        )
    shapes = ", ".join(str(list(each.shape)) for each in others[:3]) + (" ..." if len(others) > 3 else "")
    return UnsupportedError(
        f"{kind} trains {show_count(len(others), 'tensor')} (shape {shapes}) that the module does not have as "
        "parameters: gradients would be wrong or missing, and values would not be saved. Make parameters of them "
        "(`self.scale = nn.Parameter(...)`, `nn.ParameterList` for a list, a submodule for layers)."
    )
