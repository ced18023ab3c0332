"""Batches of a replica's ranks, which must be the same.

In SageMaker's library the first rank of a replica runs the step function, so what the other ranks have read does not
matter. Here all ranks run it, each with its own inputs. A loader that shuffles without a common seed would give each
stage other samples, without any error. So ranks compare what they have read. If it differs, the first rank sends its
inputs to the others from then on, as if it ran the function alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.same_inputs import digest_of

__all__ = ["SameBatches"]

# On an accelerator, reading values waits for all work, so that only the first calls and some later ones compare.
_FIRST, _EVERY = 8, 64


@final
class SameBatches:
    """Makes the inputs of a step equal on the ranks of a replica.

    Args:
        members: global ranks that must have the same.
        group: their process group.
        doing: name of a step, for messages.
        tell: called once if they differ.
    """

    def __init__(self, members: Sequence[int], group: dist.ProcessGroup, doing: str, tell: Callable[[], None]) -> None:
        self._members, self._group, self._doing, self._tell = members, group, doing, tell
        self._num_calls = 0
        self._sends = False

    def of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the first rank of the replica. Collective over its ranks."""
        if len(self._members) == 1:
            return batch
        self._num_calls += 1
        if not self._sends and self._compares(batch):
            digests = collectives.gather_numbers(digest_of(batch).number, self._doing, self._group)
            if len(set(digests)) > 1:
                self._sends = True
                self._tell()
        return self._sent(batch) if self._sends else batch

    def _compares(self, batch: dict[str, Any]) -> bool:
        is_cheap = all(value.device.type == "cpu" for value in batch.values() if isinstance(value, Tensor))
        return is_cheap or self._num_calls <= _FIRST or self._num_calls % _EVERY == 0

    def _sent(self, batch: dict[str, Any]) -> dict[str, Any]:
        is_first = dist.get_rank() == self._members[0]
        own = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)} if is_first else {}
        found = collectives.tell(own, self._members[0], self._doing, self._group)
        return {name: found[name].to(value.device) if name in found else value for name, value in batch.items()}
