"""Weights that a script reads between steps: an average of weights, or a norm, perhaps on the main process alone.

A rank that lacks weights refuses to compute with them. Before it does, it asks all ranks to gather them: the others
take part as they do in a save (:mod:`smp_strategy.engine.lifecycle.main_process_calls`). The values stay until the rank
does something next that all take part in. Other ranks would not learn of changes, so these are errors then.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.distributed.agreement.same_inputs import InputDigest, digest_of
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import guard_of, lend

__all__ = ["LentWeights"]


@final
class LentWeights:
    """Values of the parameters that this rank lacks, for a while. ``gather`` returns the full state dict of the model,
    or ``None`` if not all ranks can take part now.
    """

    def __init__(self, model: nn.Module, engine: Engine, gather: Callable[[], Mapping[str, Any] | None]) -> None:
        self._model, self._engine, self._gather = model, engine, gather
        self._lent: list[tuple[str, nn.Parameter, InputDigest, Callable[[], None]]] = []

    def ask(self) -> bool:
        """Give the parameters their values; returns whether that was possible. Collective then."""
        if self._engine.inspection.is_in_step or (state := self._gather()) is None:
            return False
        values: dict[int, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            if guard_of(parameter) is not None:
                # A copy: ranks of a machine share the memory of the state.
                values[id(parameter)] = value = state[name].detach().clone().to(parameter.device)
                self._lent.append((name, parameter, digest_of(value, most=None), lend(parameter, value)))
        return bool(values)

    def end(self) -> None:
        """Take the values back.

        Raises:
            UnsupportedError: The script has changed them.
        """
        lent, self._lent = self._lent, []
        digests = [digest_of(parameter.data, most=None) for _, parameter, _, _ in lent]
        for *_, end in lent:
            end()
        for (name, _, before, _), after in zip(lent, digests, strict=True):
            if before != after:
                raise UnsupportedError(
                    f"The script has changed `{name}` between steps, on a rank that has only a copy of its values. "
                    "Change weights in `accelerator.smp.with_weights(function)`, called on all ranks."
                )
