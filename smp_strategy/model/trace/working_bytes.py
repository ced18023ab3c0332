"""Working memory of a call: bytes beside those that it keeps for backward, when its forward or its backward is fullest.

Derived from the kernels of its forward. A result exists from its kernel to its last use. Backward runs the kernels in
reverse. The gradient of a value exists from the backward of its last use to that of the kernel that made it; those of
weights are added up at once. A saved tensor is freed behind the first kernel that reads or makes it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Kernel", "working_bytes"]


class Kernel(NamedTuple):
    """Sizes of the tensors of a kernel, by the identity of their storages."""

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    gradients: Mapping[int, int]
    """Gradients that its backward computes, by the storage of the input."""


def working_bytes(
    kernels: Sequence[Kernel], weights: Collection[int], saved: Mapping[int, int], returned: Mapping[int, int]
) -> int:
    """Bytes beside the ``saved`` ones; negative if these are never all there.

    Args:
        kernels: Kernels of the forward, in order.
        weights: Storages of parameters, whose gradients do not wait for other kernels.
        saved: Sizes of the storages that backward needs.
        returned: Sizes of the storages of results, by which a gradient arrives.
    """
    forward = _most_forward(kernels, weights, saved, returned)
    return max(forward, _most_backward(kernels, weights, saved, returned)) - sum(saved.values())


def _most_forward(
    kernels: Sequence[Kernel], weights: Collection[int], saved: Mapping[int, int], returned: Mapping[int, int]
) -> int:
    last: dict[int, int] = {}
    given: set[int] = set()
    for number, kernel in enumerate(kernels):
        given.update(key for key in kernel.inputs if key not in last)
        last.update(dict.fromkeys((*kernel.inputs, *kernel.outputs), number))
    alive = {key: nbytes for key, nbytes in saved.items() if key in given}
    now = most = sum(alive.values())
    for number, kernel in enumerate(kernels):
        for key, nbytes in kernel.outputs.items():
            if key not in given and key not in weights and key not in alive:
                alive[key] = nbytes
                now += nbytes
        most = max(most, now)
        for key in (*kernel.inputs, *kernel.outputs):
            if last[key] == number and key not in saved and key not in returned:
                now -= alive.pop(key, 0)
    return most


def _most_backward(
    kernels: Sequence[Kernel], weights: Collection[int], saved: Mapping[int, int], returned: Mapping[int, int]
) -> int:
    first: dict[int, int] = {}
    for number, kernel in enumerate(kernels):
        if kernel.gradients:
            for key in (*kernel.inputs, *kernel.outputs):
                first.setdefault(key, number)
    kept, gradients = dict(saved), dict(returned)
    now = most = sum(kept.values()) + sum(gradients.values())
    for number in range(len(kernels) - 1, -1, -1):
        kernel = kernels[number]
        arrived = [key for key in kernel.outputs if key in gradients]
        if arrived and kernel.gradients:
            most = max(most, now + sum(kernel.gradients.values()))
            now -= sum(gradients.pop(key) for key in arrived)
            for key, nbytes in kernel.gradients.items():
                if key not in weights:
                    now += nbytes - gradients.get(key, 0)
                    gradients[key] = nbytes
        for key in (*kernel.inputs, *kernel.outputs):
            if first.get(key) == number:
                now -= kept.pop(key, 0)
    return most
