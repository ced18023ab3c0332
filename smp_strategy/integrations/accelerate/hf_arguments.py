"""What Hugging Face's ``TrainingArguments`` say of processes, where several of them read the same samples.

``TrainingArguments`` ask the process group for the world size and the rank, and the Trainer takes these for the number
of processes that read samples of their own and for the number of this one: it counts batches by them, numbers the
seeds of data workers and the files of random states. Where stages read alike, both have to be those of the replica,
as they are for Accelerate. (For SageMaker's library Transformers itself has them so.) What is done once for all
processes, saving and logging, is still done by the first of the world.
"""

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["count_replicas"]


class ReplicaArguments:
    """Stands in front of the class of one ``TrainingArguments`` object.

    Attributes:
        num_data_ranks, data_rank: processes that read samples of their own, and which of them this one reads with.
        stock: the class before.
    """

    num_data_ranks: int
    data_rank: int
    stock: type

    @property
    def world_size(self) -> int:
        """Processes that read samples of their own."""
        return self.num_data_ranks

    @property
    def process_index(self) -> int:
        """Which of them this one is, or reads with."""
        return self.data_rank

    @property
    def should_log(self) -> bool:
        """Whether this is the one process (of its machine, if so asked) that logs."""
        return self._is_first(everywhere=self.log_on_each_node)  # type: ignore[attr-defined]

    @property
    def should_save(self) -> bool:
        """Whether this is the one process that writes files."""
        return self._is_first(everywhere=self.save_on_each_node)  # type: ignore[attr-defined]

    @property
    def place_model_on_device(self) -> bool:
        """The engine moves this rank's share, when it is known; the whole model may not fit."""
        return False

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the first process of the world, or of the machine, do something before the others."""
        state = self.distributed_state  # type: ignore[attr-defined]
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    def _is_first(self, *, everywhere: bool) -> bool:
        state = self.distributed_state  # type: ignore[attr-defined]
        return state.is_local_main_process if everywhere else state.is_main_process

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved with the model and copied: both give plain arguments, which another Trainer may take.
        return copyreg._reconstructor, (self.stock, object, None), dict(vars(self))  # type: ignore[attr-defined]


def count_replicas(args: Any, num_data_ranks: int, data_rank: int) -> None:
    """Let ``args`` count processes that read samples of their own.

    Args:
        args: ``TrainingArguments``.
        num_data_ranks: how many there are.
        data_rank: which of them this one is, or reads with.
    """
    stock = getattr(type(args), "stock", type(args))
    names = {
        "num_data_ranks": num_data_ranks,
        "data_rank": data_rank,
        "stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    args.__class__ = type(stock.__name__, (ReplicaArguments, stock), names)
