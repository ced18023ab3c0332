"""How many bytes a call makes autograd keep for its backward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["counting_saved"]


@contextmanager
def counting_saved(excluded: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Yields what says how many bytes autograd has kept in here.

    A storage counts once and as a whole, however many views of it are kept; those of ``excluded`` tensors (parameters
    and buffers, which are there anyway) do not count.
    """
    known = {_key(tensor) for tensor in excluded}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _key(tensor) not in known:
            found[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(found.values())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
