"""Resolves the blocks of all sources into one consistent decision.

Sources are asked in order, and the first that names a layer decides on it: the user's patterns, registered classes,
known models, PyTorch's own layers, and observed pairs. A block is left out if the user has disabled a layer of it,
hooks would see its parts, an earlier source has taken some of its layers, sizes or numbers of heads do not allow it, a
block that it is bonded with is left out, or a weight in it is tied to a layer that is not split alike. Each of these
may leave out further blocks, so the checks are repeated until nothing changes.

User hooks that would see parts of tensors; their layers stay whole.

A hook on a gradient (``layer.weight.register_hook``) expects that of the whole weight, a hook on a layer whole
activations. Between the layers of an observed pair activations look whole (:attr:`SplitKind.looks_whole`), and so they
do outside of layers that gather their output or cut their input; inside a block of a known model they are parts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn

from smp_strategy.tensor_parallel.plan.hugging_face import is_from_transformers
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind, cut_key, problem_of

__all__ = ["SplitDecision", "choose", "hook_problem"]


@final
@dataclass(frozen=True)
class SplitDecision:
    """Blocks to split, and reasons for the rest."""

    blocks: tuple[LayerBlock, ...]
    """Blocks that are split, or that stay whole on purpose."""
    reasons: Mapping[str, tuple[str, str]]
    """Source and reason for each layer that a source has named but that stays whole, by name."""

    def of(self, layer: str) -> tuple[LayerBlock, SplitKind] | None:
        return next(((block, block.layers[layer]) for block in self.blocks if layer in block.layers), None)


def choose(
    modules: Mapping[str, nn.Module],
    blocks: Iterable[LayerBlock],
    num_ranks: int,
    disabled: Mapping[str, str],
    refused: Mapping[str, str] | None = None,
    readers: Mapping[int, frozenset[str]] | None = None,
) -> SplitDecision:
    """Decide which blocks are split.

    Args:
        modules: All modules by all of their qualified names.
        blocks: Blocks of all sources, in order of precedence.
        num_ranks: Number of ranks.
        disabled: Excluded modules, with the reason.
        refused: Blocks that have turned out to be impossible, by name, with the reason.
        readers: Modules whose code reads a parameter, by its ``id``, as far as known.
    """
    first_names: dict[int, str] = {}
    for name, module in modules.items():
        first_names.setdefault(id(module), name)
    taken: dict[str, LayerBlock] = {}
    found: list[LayerBlock] = []
    for block in blocks:
        layers = {first_names[id(modules[name])]: how for name, how in block.layers.items()}
        block = replace(block, layers=layers)
        claimed = {name: taken[name] for name in layers if name in taken}
        if len(claimed) == len(layers):
            continue  # an earlier source decides on all of it
        if claimed:
            name, other = next(iter(claimed.items()))
            block = block.refused(f"`{name}` follows {other.source}, and the rest of its block must not be split alone")
        if (off := [name for name in layers if name in disabled]) and not _is_whole(block):
            block = block.refused(disabled[off[0]] if len(off) == len(layers) else f"`{off[0]}`: {disabled[off[0]]}")
        block = block.refused(refused[block.name]) if refused and block.name in refused else block
        problem = problem_of(block, modules, num_ranks) or hook_problem(block, modules)
        block = block if problem is None else block.refused(problem)
        found.append(block)
        for name in _claims(block, modules):
            taken.setdefault(name, block)
    found = [_unless_read_elsewhere(block, modules, readers or {}) for block in found]
    settled = _settled(found, modules)
    reasons: dict[str, tuple[str, str]] = {}
    for block in settled:
        if block.problem is not None:
            reasons |= {name: (block.source, block.problem) for name in block.layers if taken[name].name == block.name}
    return SplitDecision(tuple(block for block in settled if block.problem is None), reasons)


def _unless_read_elsewhere(
    block: LayerBlock, modules: Mapping[str, nn.Module], readers: Mapping[int, frozenset[str]]
) -> LayerBlock:
    """``block``, refused if code outside of a layer reads a parameter that would be cut."""
    for layer, how in block.layers.items() if block.problem is None else ():
        for own, parameter in modules[layer].named_parameters(recurse=how.style == "layer"):
            if cut_key(modules[layer], how, own) is None:
                continue
            for reader in readers.get(id(parameter), ()):
                is_owner = any(parameter is other for other in modules[reader].parameters(recurse=False))
                if not is_owner and not f"{reader}.".startswith(f"{layer}."):
                    return block.refused(f"code of `{reader or 'the step'}` reads the {own} of `{layer}`")
    return block


def _is_whole(block: LayerBlock) -> bool:
    return all(how.style == "whole" for how in block.layers.values())


def _claims(block: LayerBlock, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    for layer, how in block.layers.items():
        yield layer
        if how.style == "layer":
            yield from (name for name in modules if name.startswith(f"{layer}."))


def _settled(blocks: list[LayerBlock], modules: Mapping[str, nn.Module]) -> list[LayerBlock]:
    """``blocks`` with the problems that follow from those of others."""
    while True:
        problems = {**_tied_problems(blocks, modules), **_bond_problems(blocks)}
        if not problems:
            return blocks
        blocks = [
            block.refused(problems[number]) if number in problems else block for number, block in enumerate(blocks)
        ]


def _bond_problems(blocks: list[LayerBlock]) -> dict[int, str]:
    broken = {block.bond: block for block in blocks if block.bond is not None and block.problem is not None}
    return {
        number: f"it works together with `{broken[block.bond].name}`, which stays whole: {broken[block.bond].problem}"
        for number, block in enumerate(blocks)
        if block.problem is None and block.bond in broken
    }


def _tied_problems(blocks: list[LayerBlock], modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Blocks that cut a parameter which other layers do not cut alike."""
    owners: dict[int, dict[str, str]] = {}
    seen: set[int] = set()
    for name, module in modules.items():
        if id(module) not in seen:
            seen.add(id(module))
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                owners.setdefault(id(parameter), {})[name] = own
    hows = {name: how for block in blocks if block.problem is None for name, how in block.layers.items()}
    found: dict[int, str] = {}
    for number, block in enumerate(blocks):
        for layer, how in block.layers.items() if block.problem is None else ():
            problem = _tied_problem(layer, how, hows, owners, modules)
            if problem is not None:
                found.setdefault(number, problem)
    return found


def _tied_problem(
    layer: str,
    how: SplitKind,
    hows: Mapping[str, SplitKind],
    owners: Mapping[int, Mapping[str, str]],
    modules: Mapping[str, nn.Module],
) -> str | None:
    for own, parameter in modules[layer].named_parameters(recurse=how.style == "layer", remove_duplicate=False):
        mine = cut_key(modules[layer], how, own)
        if mine is None:
            continue
        for other, name in owners[id(parameter)].items():
            if other == layer or (how.style == "layer" and other.startswith(f"{layer}.")):
                continue
            theirs = cut_key(modules[other], hows[other], name) if other in hows else None
            if theirs != mine and not _is_declared(layer, other, modules):
                alike = "is whole" if theirs is None else "is split otherwise"
                return f"its {own} is tied to `{other}`, which {alike}"
    return None


def _is_declared(layer: str, other: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether ``other`` is a Hugging Face head that lists the bias of its layer a second time, for old files."""
    return layer.rpartition(".")[0] == other and is_from_transformers(modules[other])


_FORWARD = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hook_problem(block: LayerBlock, modules: Mapping[str, nn.Module]) -> str | None:
    """Reason why hooks prevent the split of ``block``, or ``None``."""
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
