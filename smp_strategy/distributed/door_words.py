"""Words of the door that the user came through: calls of Lightning, Accelerate or SageMaker, in errors.

Parts that refuse something (a weight on another stage, a gradient in shards) do not know who has built them, but must
name the remedy as the user would write it. The integration says its words when a run begins; they belong to the process
group, like everything else about a run.
"""

from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from smp_strategy.errors import DoorWords

__all__ = ["door_words", "speak"]


_WORDS: Final[WeakKeyDictionary[dist.ProcessGroup, DoorWords]] = WeakKeyDictionary()


def speak(words: DoorWords) -> None:
    """Use ``words`` in errors from now on, for as long as the default process group lives."""
    world = dist.group.WORLD
    assert world is not None
    _WORDS[world] = words


def door_words() -> DoorWords:
    """Words for an error; those of either door if none has begun a run."""
    world = dist.group.WORLD
    return DoorWords() if world is None else _WORDS.get(world, DoorWords())
