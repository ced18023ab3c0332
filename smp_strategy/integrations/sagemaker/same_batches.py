"""Batches of a replica's ranks, which must be the same.

In SageMaker's library the first rank of a replica runs the step function, so what the other ranks have read does not
matter. Here all ranks run it, each with its own inputs. A loader that shuffles without a common seed would give each
stage other samples, without any error. So ranks compare what they have read. If it differs, the first rank sends its
inputs to the others from then on, as if it ran the function alone.
"""

from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.same_inputs import digest_of
from smp_strategy.integrations.sagemaker.run_state import RunState

__all__ = ["SameBatches"]

_DOING: Final = "a step with `@smp.step`"
# On an accelerator, reading values waits for all work, so that only the first calls and some later ones compare.
_FIRST, _EVERY = 8, 64
_NOTE: Final = (
    "The ranks of a replica have read different batches. As in SageMaker's library, those of its first rank are used, "
    "which is sent to the others in each step. To save that, let all of them read the same: `DistributedSampler(..., "
    "num_replicas=smp.dp_size(), rank=smp.dp_rank())`, or a generator with the same seed on all ranks."
)


@final
class SameBatches:
    """Makes the inputs of a step equal on the ranks of a replica.

    Args:
        run: the run.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        # Ranks that split layers between them may have read samples of their own.
        kind = "mp" if run.config.prescaled_batch else "pp"
        self._members = run.members(kind)
        self._group = run.process_group(kind)
        self._num_calls = 0
        self._sends = False

    def of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the first rank of the replica. Collective over its ranks."""
        if len(self._members) == 1:
            return batch
        self._num_calls += 1
        if not self._sends and self._compares(batch):
            digests = collectives.gather_numbers(digest_of(batch).number, _DOING, self._group)
            if len(set(digests)) > 1:
                self._sends = True
                self._run.note(_NOTE)
        return self._sent(batch) if self._sends else batch

    def _compares(self, batch: dict[str, Any]) -> bool:
        is_cheap = all(value.device.type == "cpu" for value in batch.values() if isinstance(value, Tensor))
        return is_cheap or self._num_calls <= _FIRST or self._num_calls % _EVERY == 0

    def _sent(self, batch: dict[str, Any]) -> dict[str, Any]:
        is_first = dist.get_rank() == self._members[0]
        own = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)} if is_first else {}
        found = collectives.tell(own, self._members[0], _DOING, self._group)
        device = self._run.device
        return {
            name: found[name].to(device if value.device.type != "cpu" else "cpu") if name in found else value
            for name, value in batch.items()
        }
