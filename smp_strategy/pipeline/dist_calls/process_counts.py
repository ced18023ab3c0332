"""Numbers of processes that code of a step finds elsewhere than in ``torch.distributed``.

Models of Hugging Face divide a count that they have summed over all processes by
``accelerate.PartialState().num_processes``, and scripts read ``WORLD_SIZE``. In a step the sum runs over the replicas
([Note: collectives mean replicas] in :mod:`smp_strategy.pipeline.dist_calls.user_collectives`), so these numbers are
those of the replicas there as well.

They change for the whole process, also for threads that write a checkpoint meanwhile. So the index of this process
stays what it is: a thread that asks for the main process must not find two.
"""

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

__all__ = ["counting_replicas"]

_STATES = ("PartialState", "AcceleratorState")


@contextmanager
def counting_replicas(num_replicas: int) -> Iterator[None]:
    """Context in which there are as many processes as replicas."""
    told: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = [
        (state, {"num_processes": num_replicas}) for state in _shared_states()
    ]
    told.append((os.environ, {"WORLD_SIZE": str(num_replicas)}))
    before = [(mapping, {key: mapping[key] for key in values if key in mapping}) for mapping, values in told]
    try:
        for mapping, values in told:
            mapping.update({key: value for key, value in values.items() if key in mapping})
        yield
    finally:
        for mapping, values in before:
            mapping.update(values)


def _shared_states() -> Iterator[dict[str, Any]]:
    """Attributes of Accelerate's states, if they have been made; all of its objects share them."""
    module = sys.modules.get("accelerate.state")
    for name in () if module is None else _STATES:
        yield getattr(module, name)._shared_state
