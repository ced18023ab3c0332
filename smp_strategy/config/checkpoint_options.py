"""The options of checkpoints: in what form they are written, and when.

Beside the others (:mod:`smp_strategy.config.options`), which are about the run itself.
"""

import dataclasses
import typing
from typing import Literal

from smp_strategy.config.parsing import one_of

__all__ = ["CheckpointOptions", "StateDictType"]

StateDictType = Literal["full", "sharded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints. Either form is read under any layout, whatever these options say."""

    state_dict_type: StateDictType = "full"
    """``full``: one ordinary file, as one process writes it. ``sharded``: a directory in the format of
    ``torch.distributed.checkpoint``, to which each rank writes what it holds."""
    async_save: bool = False
    """Go on with training while files are written: it stops for the copy to host memory only."""

    checkpoint_weights_only: bool = True
    """Load nothing but tensors and plain values, so that no file can run code. ``False``: whatever there is in the
    full form, which only files that you trust should make you say. What is given to ``trainer.fit(..., weights_only=)``
    goes first."""

    def _problems(self) -> list[str]:
        return one_of(self, "state_dict_type", typing.get_args(StateDictType))
