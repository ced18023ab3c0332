"""Options that only this integration has: their choices, and their values from arguments or environment variables.

The launcher reads them too, before there are processes, so nothing here imports Accelerate.
"""

import typing
from collections.abc import Mapping
from typing import Any, Literal

from smp_strategy.config.keywords import OptionKeywords
from smp_strategy.config.parsing import parse
from smp_strategy.config.variables import DOOR_OPTIONS, text_of_variable

__all__ = ["OWN_OPTIONS", "LossInModel", "LossReduction", "PluginKeywords", "TrainingOutputs", "take_own", "wrong_own"]

LossInModel = Literal["auto"] | bool
LossReduction = Literal["mean", "sum"]
TrainingOutputs = Literal["all", "loss"]


class PluginKeywords(OptionKeywords, total=False):
    """Keyword arguments of SMPPlugin."""

    loss_in_model: LossInModel
    loss_reduction: LossReduction
    training_outputs: TrainingOutputs


OWN_OPTIONS: Mapping[str, Any] = {
    "loss_in_model": "auto",
    "loss_reduction": "mean",
    "training_outputs": "all",
}
"""Defaults."""
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "loss_in_model": ("auto", True, False),
    "loss_reduction": typing.get_args(LossReduction),
    "training_outputs": typing.get_args(TrainingOutputs),
}
assert (
    set(OWN_OPTIONS)
    == set(_CHOICES)
    == DOOR_OPTIONS
    == set(PluginKeywords.__annotations__) - set(OptionKeywords.__annotations__)
)


def take_own(options: dict[str, Any], environ: Mapping[str, str]) -> tuple[list[Any], list[str]]:
    """Pop the options that only this integration has from ``options``; return their values and problems."""
    values, problems = [], []
    for name, value in OWN_OPTIONS.items():
        text = text_of_variable(environ, name)
        if text is not None:
            value = _parsed(name, text)
        value = options.pop(name, value)
        problems += _problems(name, value)
        values.append(value)
    return values, problems


def wrong_own(name: str, text: str) -> list[str]:
    """Problems of ``text`` as the value of the option ``name``."""
    return _problems(name, _parsed(name, text))


def _parsed(name: str, text: str) -> Any:
    return parse(text, bool | str if name == "loss_in_model" else str)


def _problems(name: str, value: Any) -> list[str]:
    choices = _CHOICES[name]
    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return []
    return [f"`{name}` must be one of {', '.join(map(str, choices))}, but is {value!r}."]
