"""Activation options: which units recompute, which offload."""

import dataclasses
import re

from smp_strategy.config.foreign_words import meant_value
from smp_strategy.config.parsing import as_text, at_least_one, empty_item
from smp_strategy.config.sizes import as_bytes

__all__ = ["ActivationOptions", "group_size"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Activation checkpointing and offload."""

    activation_checkpointing: str | tuple[str, ...] = "none"
    """Units that keep only their inputs and recompute the rest in backward: ``none``, ``all``, or units by patterns of
    module names or by classes: ``blocks.*``, ``GPT2Block``. ``auto``: only as many as `memory_limit` makes
    necessary."""
    checkpoint_strategy: str = "each"
    """Grouping of units of one list that follow each other on a stage: ``each`` is recomputed by itself, all of them
    together (``contiguous``), or N together (``group_N``). A group keeps only the inputs of its first unit."""
    selective_checkpointing: bool = False
    """Keep the results of matrix products, convolutions and attention as well, and recompute only the rest."""
    preserve_rng_state: bool = True
    """Recompute with the same random numbers, in dropout for instance."""
    offload_activations: bool = False
    """Offload activations to host memory: the inputs of recomputed units, or all activations if none are
    recomputed."""
    offload_min_bytes: int | str = "1MiB"
    """Size from which tensors are offloaded: bytes, or text like ``256KiB``."""
    activation_loading_horizon: int = 4
    """Pipeline actions (calls of units with one stage) by which offloaded activations are loaded ahead of their use.
    Activations that are needed sooner than that after forward are not offloaded."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "activation_loading_horizon") + self._problems_of_offload()
        found += _problems_of_words(self.activation_checkpointing)[:1]
        if group_size(self.checkpoint_strategy) == 0:
            found.append(
                "`checkpoint_strategy` must be each, contiguous or group_N with N from 1 on, but is "
                f"{self.checkpoint_strategy!r}."
            )
        given = [name for name in ("checkpoint_strategy", "preserve_rng_state") if _is_given(self, name)]
        if self.activation_checkpointing in ("none", ()) and given:
            found += [
                f"`{name}={getattr(self, name)!r}` has no effect, because nothing is computed again. Set "
                "`activation_checkpointing`, or leave it out."
                for name in given
            ]
        return found

    def _problems_of_offload(self) -> list[str]:
        found = []
        try:
            if as_bytes(self.offload_min_bytes) < 0:
                found.append(f"`offload_min_bytes` must be at least 0, but is {self.offload_min_bytes}.")
        except ValueError as error:
            found.append(f"`offload_min_bytes`: {error}")
        if not self.offload_activations:
            found += [
                f"`{name}={getattr(self, name)!r}` has no effect, because nothing is offloaded. Set "
                "`offload_activations=True`, or leave it out."
                for name in ("offload_min_bytes", "activation_loading_horizon")
                if _is_given(self, name)
            ]
        return found

    @property
    def least_offloaded(self) -> int:
        """Size in bytes from which tensors are offloaded."""
        return as_bytes(self.offload_min_bytes)

    @property
    def checkpointing_patterns(self) -> tuple[str, ...]:
        """Patterns of modules in `activation_checkpointing`."""
        given = self.activation_checkpointing
        if isinstance(given, str):
            given = () if given in ("none", "all", "auto") else tuple(given.split(","))
        return tuple(pattern.strip() for pattern in given if pattern.strip())


_WORDS = ("none", "all", "auto")


def _problems_of_words(given: str | tuple[str, ...]) -> list[str]:
    """Error texts for words in `activation_checkpointing` that would be taken for patterns of modules."""
    patterns = given.removesuffix(",").split(",") if isinstance(given, str) else given
    if given and not all(pattern.strip() for pattern in patterns):
        return [empty_item("activation_checkpointing", given)]
    found = []
    for pattern in patterns:
        word = pattern.strip().lower()
        if meant := meant_value("activation_checkpointing", word):
            found.append(
                f"`activation_checkpointing={as_text(given)}`: {pattern} names no modules. Write `{meant}`. The words "
                "are `all`, `none`, `auto` (as many units as memory makes necessary), and patterns: `blocks.*`."
            )
        elif word in _WORDS and (len(patterns) > 1 or isinstance(given, tuple)):
            found.append(
                f"`activation_checkpointing={given!r}`: {word!r} stands for all units and beside nothing else. Write "
                f"the word alone, not in a list, or patterns of modules."
            )
        elif word in _WORDS and word != given:
            found.append(f"`activation_checkpointing={given!r}` must be written {word!r}.")
    return found


def group_size(strategy: str) -> int | None:
    """Number of adjacent units that a checkpointing strategy groups; ``None``: all, 0: unknown strategy."""
    if strategy == "contiguous":
        return None
    if strategy == "each":
        return 1
    number = strategy.removeprefix("group_")
    return int(number) if number != strategy and re.fullmatch(r"\d{1,9}", number) else 0


def _is_given(config: object, name: str) -> bool:
    return bool(getattr(config, name) != getattr(type(config), name))
