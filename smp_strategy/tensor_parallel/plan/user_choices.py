"""The user's choices: patterns for layers, ``{"*.mlp.up": "column"}``, and modules to include or exclude.

A pattern is matched against the qualified names of all modules, like file names (``*`` matches anything, dots too). Of
several matches the last one counts. Layers named in one module belong together: columns of one feed the rows of another
in parts. The code in between must work on parts. That is either proven or declared:

* it is elementwise, which the observation of a step shows (:mod:`smp_strategy.tensor_parallel.plan.observed_pairs`), or
* it works on heads, whose number the user names as well: ``{"*.attn.num_heads": "heads"}``. That attribute is divided
  while the layers are split, and heads stay together.

Otherwise a layer by columns gathers its output, and one by rows cuts its input: right, but slower.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.model.annotations import ModuleNotes
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind, linear_sizes

__all__ = [
    "STYLES",
    "heads_explained",
    "pattern_blocks",
    "disabled",
    "is_enabled",
    "set_tensor_parallelism",
    "tensor_parallelism",
]


STYLES = ("column", "row", "vocab", "embedding", "replicate", "heads")
SOURCE = "pattern"

_HOWS = {
    "column": SplitKind("column"),
    "row": SplitKind("row"),
    "vocab": SplitKind("vocab"),
    "embedding": SplitKind("embedding", is_whole_outside=True),
    "replicate": SplitKind("whole"),
}


def pattern_blocks(
    modules: Mapping[str, nn.Module],
    patterns: Mapping[str, str],
    goes_into: Callable[[str, str], bool] = lambda column, row: False,
) -> Iterator[LayerBlock]:
    """Blocks of the layers that ``patterns`` name.

    Args:
        modules: All modules by qualified name.
        patterns: Styles by pattern.
        goes_into: Whether the output of the first layer is known to reach the second one, through elementwise
            operations only, and nothing else.

    Raises:
        ConfigError: A style is unknown, or a pattern matches nothing.
    """
    styles, heads = _matched(modules, patterns)
    by_parent: dict[str, dict[str, SplitKind]] = {}
    for name, style in styles.items():
        by_parent.setdefault(name.rpartition(".")[0], {})[name] = _HOWS[style]
    for parent, layers in by_parent.items():
        whole = {name: how for name, how in layers.items() if how.style == "whole"}
        if whole:
            yield LayerBlock(parent, SOURCE, whole)
        split = {name: how for name, how in layers.items() if how.style != "whole"}
        if not split:
            continue
        if parent in heads:
            yield _with_heads(parent, split, heads[parent], modules)
        else:
            yield from _by_proof(parent, split, goes_into)


@contextmanager
def heads_explained(patterns: Mapping[str, str]) -> Iterator[None]:
    """Context that adds a hint to errors of a step run with some of the heads."""
    try:
        yield
    except Exception as error:
        heads = [pattern for pattern, style in patterns.items() if style == "heads"]
        if heads and not isinstance(error, SMPError):
            error.add_note(
                f"`tensor_parallel` divides {', '.join(f'`{pattern}`' for pattern in heads)}: between the layers that "
                "it names, code has some of the heads and their features only. Code that counts features otherwise "
                "(`.split(self.n_embd)`, `C // self.n_head`) needs all of them: compute sizes by heads "
                "(`.chunk(3, -1)`, `.view(B, T, self.n_head, -1)`), or leave the number of heads out of "
                "`tensor_parallel`, which gathers all heads for it."
            )
        raise


def _matched(
    modules: Mapping[str, nn.Module], patterns: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Styles by layer, and attributes with numbers of heads by module."""
    problems: list[str] = []
    styles: dict[str, str] = {}
    heads: dict[str, tuple[str, ...]] = {}
    for pattern, style in patterns.items():
        if style not in STYLES:
            problems.append(f"`tensor_parallel` gives `{pattern}` the style {style!r}; known are {', '.join(STYLES)}.")
        elif style == "heads":
            found = _attributes(modules, pattern)
            for owner, attribute in found:
                heads[owner] = (*heads.get(owner, ()), attribute)
            if not found:
                problems.append(f"`tensor_parallel` calls `{pattern}` heads, but no module has such a whole number.")
        else:
            named = [name for name in modules if fnmatchcase(name, pattern)]
            styles |= dict.fromkeys(named, style)
            if not named:
                problems.append(f"`tensor_parallel` names `{pattern}`, but no module has a name like that.")
    if problems:
        raise ConfigError(problems)
    return _inner(styles, modules), heads


def _inner(styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Apply ``replicate`` to everything in a module; other styles are for layers only."""
    found = {}
    for name, style in styles.items():
        if style != "replicate":
            found[name] = style
            continue
        for inner, module in modules.items():
            is_in = inner == name or inner.startswith(f"{name}.")
            if is_in and styles.get(inner, style) == style and any(True for _ in module.parameters(recurse=False)):
                found[inner] = style
    return found


def _attributes(modules: Mapping[str, nn.Module], pattern: str) -> list[tuple[str, str]]:
    """Modules and their attributes that match ``pattern`` and hold an integer."""
    owners, _, attribute = pattern.rpartition(".")
    return [
        (name, found)
        for name, module in modules.items()
        if fnmatchcase(name, owners)
        for found, value in vars(module).items()
        if fnmatchcase(found, attribute) and isinstance(value, int) and not isinstance(value, bool)
    ]


def _with_heads(
    parent: str, layers: Mapping[str, SplitKind], attributes: tuple[str, ...], modules: Mapping[str, nn.Module]
) -> LayerBlock:
    """A block whose code works on heads."""
    # Each of several numbers (heads, fewer key heads) belongs to the layers that it divides into equal heads.
    numbers = sorted({int(getattr(modules[parent], attribute)) for attribute in attributes}, reverse=True)
    lengths = {
        name: sizes[1 if how.style == "column" else 0]
        for name, how in layers.items()
        if (sizes := linear_sizes(modules[name])) is not None
    }
    rows = [length for name, length in lengths.items() if layers[name].style == "row"]
    widest = max(rows or lengths.values(), default=0)
    head, rest = divmod(widest, numbers[0])
    odd = [
        name for name, length in lengths.items() if rest or length % head or length // head not in _multiples(numbers)
    ]
    hows = {}
    for name, how in layers.items():
        num_blocks = 1
        if name in lengths and how.style == "column" and not odd and lengths[name] // head not in numbers:
            num_blocks = lengths[name] // head // numbers[0]
        hows[name] = replace(how, num_blocks=num_blocks, granule=head if name in lengths and not odd else 1)
    named = {attribute: int(getattr(modules[parent], attribute)) for attribute in attributes}
    block = LayerBlock(parent, SOURCE, hows, named, tuple((parent, attribute) for attribute in attributes))
    if odd:
        return block.refused(f"{lengths[odd[0]]} features of `{odd[0]}` are not those of {numbers} heads of one size")
    if not rows or not any(how.style == "column" for how in hows.values()):
        return block.refused("heads need layers by columns before them and one by rows after them, named in one module")
    return block


def _multiples(numbers: list[int]) -> set[int]:
    """Possible numbers of heads of a layer: one of ``numbers``, or queries, keys and values fused."""
    return {*numbers, 2 * numbers[0], 3 * numbers[0]}


def _by_proof(
    parent: str, layers: Mapping[str, SplitKind], goes_into: Callable[[str, str], bool]
) -> Iterator[LayerBlock]:
    """Blocks of layers proven to go from columns into rows; the others each in a block of its own."""
    rows = [name for name, how in layers.items() if how.style == "row"]
    proven = {
        name: row for name, how in layers.items() if how.style == "column" for row in rows if goes_into(name, row)
    }
    for row in rows:
        columns = [name for name, into in proven.items() if into == row]
        if columns:
            yield LayerBlock(
                parent, SOURCE, {name: replace(layers[name], looks_whole=True) for name in (*columns, row)}
            )
    for name, how in layers.items():
        if name not in proven and name not in proven.values():
            yield LayerBlock(name, SOURCE, {name: replace(how, is_whole_outside=how.style != "vocab")})


# --- modules to include or exclude -----------------------------------------------------------------------------------
# `set_tensor_parallelism`, `tensor_parallelism`: the user includes modules in the split, or excludes them.
#
# Both have the names of SageMaker's library::
#
#     smp_strategy.set_tensor_parallelism(model.head, False)     # a module and everything in it now
#
#     with smp_strategy.tensor_parallelism():                    # every module that is created in here
#         self.encoder = Encoder()
#
# A later call overrides an earlier one, so contexts may be nested (the innermost wins) and single layers set after the
# whole model. A module without a setting follows its parent. Without any setting, everything that can be split is; if a
# module outside of a disabled one is enabled, only enabled modules are. Copies of a module keep its setting.


_ENABLED = ModuleNotes[bool]("_smp_tensor_parallel")

Module = TypeVar("Module", bound=nn.Module)


def set_tensor_parallelism(module: Module, enabled: bool = True) -> Module:
    """Enable or disable the split of ``module`` and everything that it contains now; returns ``module``.

    A later call, or a later ``tensor_parallelism`` context, overrides this one.

    Raises:
        ConfigError: ``enabled`` is not a bool.
    """
    _check(enabled)
    _ENABLED.leave_on(module, enabled)
    return module


def tensor_parallelism(enabled: bool = True) -> AbstractContextManager[None]:
    """Context that enables or disables the split of all modules created in it.

    Contexts may be nested: the innermost wins.

    Raises:
        ConfigError: ``enabled`` is not a bool.
    """
    _check(enabled)
    return _ENABLED.on_new(enabled)


def is_enabled(module: nn.Module) -> bool:
    """Whether the user has enabled the split of ``module`` itself."""
    return _ENABLED.of(module) is True


def disabled(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules that the user's settings exclude, with the reason.

    Args:
        modules: All modules by qualified name, parents first.
    """
    notes: dict[str, bool] = {}
    # Setting of the outermost ancestor that has one.
    outermost: dict[str, bool] = {}
    for name, module in modules.items():
        around = name.rpartition(".")[0]
        note = _ENABLED.of(module)
        if note is None:
            note = notes.get(around)
        if note is not None:
            outermost[name] = outermost.get(around, note)
            notes[name] = note
    is_chosen = any(outermost.values())
    reasons = {
        True: None,
        False: "tensor parallelism is disabled for it",
        None: "tensor parallelism is not enabled for it",
    }
    found = {name: reasons[notes.get(name, None if is_chosen else True)] for name in modules}
    return {name: reason for name, reason in found.items() if reason is not None}


def _check(enabled: object) -> None:
    if not isinstance(enabled, bool):
        raise ConfigError(f"`enabled` must be true or false, but is {enabled!r}.")
