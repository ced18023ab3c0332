"""User hooks that would see parts of tensors; their layers stay whole.

A hook on a gradient (``layer.weight.register_hook``) expects that of the whole weight, a hook on a layer whole
activations. Between the layers of an observed pair activations look whole (:attr:`SplitKind.looks_whole`), and so they
do outside of layers that gather their output or cut their input; inside a block of a known model they are parts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind, cut_key

__all__ = ["hook_problem"]

_FORWARD = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hook_problem(block: LayerBlock, modules: Mapping[str, nn.Module]) -> str | None:
    """Reason why hooks prevent the split of ``block``, or ``None``.

    Args:
        block: Block to be split.
        modules: All modules by qualified name.
    """
    for layer, how in block.layers.items():
        for own, parameter in modules[layer].named_parameters(recurse=how.style == "layer"):
            is_cut = cut_key(modules[layer], how, own) is not None
            if is_cut and any(_are_users(getattr(parameter, hooks, None)) for hooks in _OF_GRADIENTS):
                return f"a hook on the gradient of `{layer}.{own}` would see a part of it"
    for name in _among_parts(block, modules):
        if any(_are_users(getattr(modules[name], hooks)) for hooks in _FORWARD):
            return f"a hook on `{name}` would see parts of activations"
    return None


def _are_users(hooks: Mapping[int, Any] | None) -> bool:
    """Whether one of ``hooks`` is not this package's own, which can handle parts."""
    modules = [str(getattr(hook, "__module__", "")) for hook in (hooks or {}).values()]
    return any(module.partition(".")[0] != "smp_strategy" for module in modules)


def _among_parts(block: LayerBlock, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Modules that read or return parts which do not look whole."""
    region = [name for name, how in block.layers.items() if _has_bare_parts(how)]
    if not region:
        return
    yield from region
    others = [name for name in modules if _is_in(name, block) and name not in block.layers]
    # Activations and dropout: modules without parameters, children of the same modules as the layers of the block.
    homes = {name.rpartition(".")[0] for name in region}
    for name in others:
        if name.rpartition(".")[0] in homes and next(modules[name].parameters(), None) is None:
            yield name


def _has_bare_parts(how: SplitKind) -> bool:
    return how.style in ("column", "row", "inside") and not (how.looks_whole or how.is_whole_outside)


def _is_in(name: str, block: LayerBlock) -> bool:
    return name != "" and (not block.name or name.startswith(f"{block.name}."))
