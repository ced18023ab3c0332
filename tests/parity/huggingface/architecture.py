"""One line of the table: a Hugging Face model class, its tiny configuration, and what it is fed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import smp_strategy

from .inputs import Draw
from .tiny import tiny_config

__all__ = ["Architecture", "Trainee", "family"]

SAMPLES = 4

Inputs = Callable[[Draw, Any], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """A model to compare."""

    family: str
    name: str
    """Name of the model's class."""
    inputs: Inputs
    """Makes a batch, given a source of random numbers and the configuration."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What of its configuration differs from the common tiny sizes."""
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    """Picks the loss out of what the model returns."""
    whole: tuple[str, ...] = ()
    """Modules that the user has to mark with :func:`smp_strategy.unit`."""
    is_random: bool = False
    """Whether it draws random numbers even without dropout. They are those of a pipeline of one stage, not of a plain
    process."""
    is_in_order: bool = True
    """Whether gradients are added in the order of one process where weights are not tied. They are not where a value is
    used on several stages: each adds up its own uses first."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Options that it needs."""
    note: str = ""
    """What is special about it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    def build(self) -> "Trainee":
        """The model with random weights, the same at every call."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.name)
        model = kind(tiny_config(kind.config_class, **self.options))
        for name in self.whole:
            smp_strategy.unit(model.get_submodule(name))
        return Trainee(model, self.loss).train()

    def batch(self, config: Any) -> dict[str, Any]:
        """A random batch, the same at every call."""
        return self.inputs(Draw(SAMPLES), config)


class Trainee(nn.Module):
    """A model in the place of a LightningModule: its step asks the model for its own loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss

    def step(self, batch: dict[str, Any]) -> Tensor:
        return self.loss_of(self.model(**batch))


def family(
    name: str, inputs: Inputs, models: Mapping[str, Mapping[str, Any]] | Sequence[str], **common: Any
) -> list[Architecture]:
    """Architectures that are fed alike.

    Args:
        name: of the family.
        inputs: what they are fed.
        models: names of model classes, with options of their configurations if there are any.
        common: other attributes that they share.
    """
    options = models if isinstance(models, Mapping) else dict.fromkeys(models, {})
    return [Architecture(name, model, inputs, given, **common) for model, given in options.items()]
