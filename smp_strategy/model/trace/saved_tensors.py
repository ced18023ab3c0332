"""Saved activations of a call: bytes that autograd saves for backward, measured by saved-tensor hooks.

``torch.func`` transforms inside of units, under saved-tensor hooks.

PyTorch refuses ``torch.func.grad`` and its like where such hooks are set. Hooks that only observe are removed while a
transform runs. Where tensors saved inside would be lost, the user gets an error with a remedy.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks

from smp_strategy.distributed.torch_private import outer_saved_tensor_hooks
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.flops import KernelTally, Product
from smp_strategy.model.trace.tensor_spec import storage_of
from smp_strategy.model.trace.work import Effort, SavedBytes, StorageBytes
from smp_strategy.model.trace.working_bytes import working_bytes

__all__ = ["counting_saved", "watching_kept", "without_transforms"]


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
            working_bytes(tally.kernels, there, saved, _gradients(returned)),
        )

    with _noting(excluded, saved, look):
        yield kept


def _gradients(leaves: Iterable[Any]) -> dict[int, int]:
    """Bytes of the gradients of the tensors among ``leaves``, by storage."""
    return {storage_of(leaf): leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}


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

    with _stepping_aside(saved_tensors_hooks(keep, lambda tensor: tensor)):
        yield


@contextmanager
def without_transforms(unit: str, why: str, remedy: str) -> Iterator[None]:
    """Replace PyTorch's error for a transform in here by one with an explanation.

    Args:
        unit: Name of the running unit.
        why: Reason for the hooks; follows "a unit" in the sentence.
        remedy: A sentence.

    Raises:
        UnsupportedError: A transform was called.
    """
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise UnsupportedError(
            f"{unit} is a unit {why}, which takes hooks on saved tensors, and PyTorch does not allow them around "
            f"`torch.func.grad`, `vjp`, `jacrev` or `hessian`. {remedy}"
        ) from error


@contextmanager
def _stepping_aside(hooks: graph.saved_tensors_hooks) -> Iterator[None]:
    """Set ``hooks`` in here, except while a transform runs."""
    disabled = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled_without_ours(message: str) -> Iterator[None]:
        top = outer_saved_tensor_hooks()
        if top is None or top[0] is not hooks.pack_hook:
            with disabled(message):
                yield
            return
        hooks.__exit__()
        try:
            with disabled(message):
                yield
        finally:
            hooks.__enter__()

    # torch looks this function up whenever a transform begins.
    vars(graph)["disable_saved_tensors_hooks"] = disabled_without_ours
    try:
        with hooks:
            yield
    finally:
        vars(graph)["disable_saved_tensors_hooks"] = disabled
