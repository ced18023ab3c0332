"""Private functions of PyTorch that this package calls, under names of its own.

A new release of PyTorch may rename or drop any of them; then this file is the one to change. Each has a test of what is
expected of it (``tests/unit/distributed/test_torch_private.py``). The compiler's are in
:mod:`smp_strategy.model.compiled_code`. Names that PyTorch's documentation uses (``FakeTensorMode``,
``TorchDispatchMode``, pytrees) are imported where they are used.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, overrides
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

__all__ = [
    "after_backward",
    "assert_later",
    "checkpoints_run_in",
    "current_backward",
    "default_group",
    "default_store",
    "disabled_torch_function",
    "export_device_memory",
    "is_in_backward",
    "is_profiling",
    "is_under_transform",
    "keeps_graph",
    "mode_set_aside",
    "native_functions",
    "node_of",
    "num_storage_uses",
    "open_device_memory",
    "outer_saved_tensor_hooks",
    "overlaps_itself",
    "parse_to",
    "plain_functions",
    "plain_functions_and_modes",
    "sequence_number",
    "set_backend",
    "swap_contents",
    "unscale_",
    "will_run",
    "without_version_key",
]

# Backward

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread runs; -1 if there is none."""


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return current_backward() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the whole backward pass that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def keeps_graph() -> bool:
    """Whether the backward pass that runs now was called with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def will_run(node: Node) -> bool:
    """Whether the backward pass that runs now reaches ``node``."""
    return torch._C._will_engine_execute_node(node)


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Number of the next autograd node of this thread; later nodes have higher numbers."""


def outer_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Functions of the innermost ``saved_tensors_hooks`` that are set; ``None``: there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_under_transform() -> bool:
    """Whether a transform of ``torch.func`` (``grad``, ``vmap`` ...) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_profiling() -> bool:
    """Whether a profiler of PyTorch records."""
    return torch.autograd.profiler._is_profiler_enabled


# The generator that `checkpoint(use_reentrant=False)` runs around the function; from torch 2.14 on the first name.
_CHECKPOINTS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextmanager
def checkpoints_run_in(
    around: Callable[[Callable[[], Iterator[None]], Any, bool, Any], Iterator[None]],
) -> Iterator[None]:
    """Context in which ``checkpoint(use_reentrant=False)`` runs its function at the ``yield`` of ``around``.

    Args:
        around: gets a function that makes PyTorch's own generator, then the arguments ``function``,
            ``preserve_rng_state`` and ``context_fn`` of ``checkpoint``.
    """
    name = next(name for name in _CHECKPOINTS if hasattr(torch_checkpoint, name))
    original = getattr(torch_checkpoint, name)
    signature = inspect.signature(original)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = signature.bind(*args, **kwargs).arguments
        return around(lambda: original(*args, **kwargs), given["fn"], given["preserve_rng_state"], given["context_fn"])

    setattr(torch_checkpoint, name, generator)
    try:
        yield
    finally:
        setattr(torch_checkpoint, name, original)


# Tensors

plain_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which functions treat tensors of subclasses as plain tensors."""

plain_functions_and_modes = torch._C.DisableTorchFunction
"""The same, and modes are not asked either."""


@contextmanager
def mode_set_aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Context in which ``mode`` is not asked, if it is the innermost mode of functions; otherwise it is as before."""
    if overrides._get_current_function_mode() is not mode:
        yield
        return
    with overrides._pop_mode_temporarily():
        yield


disabled_torch_function = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a subclass whose operations give plain tensors."""


def node_of(tensor: Tensor) -> Node | None:
    """Autograd node of ``tensor`` itself, whatever its class has made of ``grad_fn``."""
    with plain_functions():
        node: Node | None = vars(torch._C.TensorBase)["grad_fn"].__get__(tensor)
    return node


native_functions = torch._C._nn
"""Namespace of functions of ``torch.nn.functional`` that are written in C++."""


def swap_contents(tensor: Tensor, other: Tensor) -> None:
    """Exchange memory and metadata of two tensors; all references, also weak ones, keep meaning the same object.

    Raises:
        RuntimeError: there are other references to ``other``.
    """
    torch._C._swap_tensor_impl(tensor, other)


def num_storage_uses(tensor: Tensor) -> int:
    """Number of references to the memory of ``tensor``, from tensors or from the caller."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of ``tensor`` have the same memory, as after ``expand``."""
    return torch._debug_has_internal_overlap(tensor) == 1


def without_version_key() -> Any:
    """Context in which ``detach`` gives a tensor that shares the version counter, but is no view for autograd."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Arguments of ``Tensor.to`` as device, dtype, ``non_blocking`` and memory format."""
    return torch._C._nn._parse_to(*args, **kwargs)


def unscale_(gradients: list[Tensor], overflow: Tensor, inverse: Tensor) -> None:
    """Multiply ``gradients`` by ``inverse``; ``overflow`` becomes 1 if a value is not finite. As PyTorch's scaler does.

    Args:
        gradients: of one device and dtype.
        overflow: float32 scalar.
        inverse: float32 scalar.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)


def assert_later(condition: Tensor, message: str) -> None:
    """Raise ``message`` if ``condition`` is false; on an accelerator without waiting for its value."""
    torch._assert_async(condition, message)


def export_device_memory(memory: Tensor) -> tuple[Any, ...]:
    """Name of the storage of ``memory``, on a CUDA device, for other processes; without its first entry, the device."""
    return tuple(memory.untyped_storage()._share_cuda_())[1:]


def open_device_memory(exported: tuple[Any, ...], device: torch.device) -> Tensor:
    """Storage of another process as ``uint8`` of ``device``, which need not be the one that it is on."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *exported)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


# Process groups


def default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def default_store() -> dist.Store:
    """The store through which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def set_backend(group: dist.ProcessGroup, device: torch.device, *, of: dist.ProcessGroup) -> None:
    """Let ``group`` send tensors on ``device``, of which it carries none, by the gloo backend of the group ``of``."""
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, of._get_backend(device))
