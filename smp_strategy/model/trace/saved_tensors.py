"""Saved activations of a call: bytes that autograd saves for backward, measured by saved-tensor hooks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smp_strategy.model.trace.flops import KernelTally, Product
from smp_strategy.model.trace.func_transforms import stepping_aside
from smp_strategy.model.trace.tensor_spec import storage_of
from smp_strategy.model.trace.work import Effort, SavedBytes, StorageBytes

__all__ = ["counting_saved", "watching_kept"]


@contextmanager
def counting_saved(excluded: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of bytes that autograd has saved in here.

    A storage counts once and as a whole, however many views of it are saved; storages of ``excluded`` tensors
    (parameters and buffers, which exist anyway) do not count.
    """
    found: dict[int, int] = {}
    with _noting(excluded, found, lambda: None):
        yield lambda: sum(found.values())


@contextmanager
def watching_kept(
    excluded: Iterable[Tensor], inputs: Iterable[Any], tally: KernelTally
) -> Iterator[Callable[[Iterable[Any]], SavedBytes]]:
    """Yield a function that maps the results of the call to its saved bytes and the cost to recompute them.

    Args:
        excluded: Tensors that exist anyway: parameters and buffers.
        inputs: Arguments of the call.
        tally: Counts the kernels in here, and records the results of products.
    """
    excluded = list(excluded)
    there = {storage_of(tensor) for tensor in excluded}
    given = {key: nbytes for key, nbytes in _sizes(inputs).items() if key not in there}
    saved: dict[int, int] = {}
    again = cheap = Effort()
    needed: list[Product] = []

    def look() -> None:
        # Called at each saved tensor: kernels after the last one need not run again.
        nonlocal again, cheap
        again, cheap = tally.efforts.forward, tally.cheap
        needed[:] = tally.products

    def kept(returned: Iterable[Any]) -> SavedBytes:
        nonlocal cheap
        foreign = {*_sizes(returned), *given, *there}
        of_products: dict[int, int] = {}
        for product in needed:
            sizes = _sizes(product.results)
            if product.may_be_kept and foreign.isdisjoint(sizes):
                of_products |= sizes
            else:  # others may change the results, so they are recomputed
                cheap = cheap.plus(product.effort)
        made = {key: nbytes for key, nbytes in {**of_products, **saved}.items() if key not in given}
        return SavedBytes(
            (
                *(StorageBytes(nbytes, "input", key in saved) for key, nbytes in given.items()),
                *(StorageBytes(made[key], "product" if key in of_products else "other", key in saved) for key in made),
            ),
            again,
            cheap,
        )

    with _noting(excluded, saved, look):
        yield kept


def _sizes(leaves: Iterable[Any]) -> dict[int, int]:
    """Bytes of the storages of the tensors among ``leaves``."""
    return {storage_of(leaf): leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor)}


@contextmanager
def _noting(excluded: Iterable[Tensor], found: dict[int, int], look: Callable[[], None]) -> Iterator[None]:
    """Write the bytes of saved storages to ``found``, and call ``look`` at each new one."""
    known = {storage_of(tensor) for tensor in excluded}

    def keep(tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in known:
            if storage_of(tensor) not in found:
                look()
            found[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with stepping_aside(saved_tensors_hooks(keep, lambda tensor: tensor)):
        yield
