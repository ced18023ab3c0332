"""Finds weights, optimizer state and names of parameters in the nested dicts of checkpoint formats.

======================================= ===============================================================================
Lightning's file                        ``state_dict``, ``optimizer_states[0]``, and everything else
sharded directories, ours and its       ``state_dict`` (``model`` of FSDP), ``optimizer_0``; everything else in meta.pt
scripts of one's own                    ``model``, ``model_state_dict``, ...; ``optimizer``, ``optim``, ...
a bare state dict                       names and tensors
======================================= ===============================================================================

Names of parameters in checkpoints: numbers of optimizers, prefixes of LightningModules, tied weights.

[Note: parameter numbers] PyTorch saves the state of an optimizer by numbers, in the order in which its groups have the
parameters; the model's state dict has names, in the order of the modules, with buffers and further names of tied
parameters in between. Some files have both: optimizers made with ``named_parameters()`` save ``param_names``. For
others, the shapes of the state decide, if a group's parameters can be found in the order of the modules in one way
only::

    state dict   embedding [9, 4]   weight [4, 4]   running_mean [4]   bias [4]
    group 0      [9, 4]             [4, 4]                                       one way
    group 1                                         [4]                          two ways: refused

Prefixes: a LightningModule has the model as an attribute, so its checkpoint has ``model.encoder.weight`` for the
model's ``encoder.weight``. Prefixes are found, removed and added.

Tied weights: exchange formats leave out further names, and a module wants to find them. Hugging Face saves
``shared.weight`` only; the module's state dict has ``lm_head.weight``, too.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor, OptimizerContents, tensors_of
from smp_strategy.checkpoint.sources import flattened
from smp_strategy.checkpoint.state_dict import with_lists
from smp_strategy.errors import CheckpointError

__all__ = [
    "PARAMETER_NAMES",
    "contents_of",
    "parameter_shapes",
    "read_optimizer",
    "add_prefix",
    "add_tied",
    "find_parameters",
    "find_prefix",
    "named_groups",
    "numbered_groups",
    "strip_prefix",
]


Shape = tuple[int, ...]
# Key of a group: names that are known from elsewhere.
NAMES: Final = "smp_strategy/names"


def find_parameters(shapes: Sequence[Shape | None], weights: Mapping[str, Shape]) -> list[str] | None:
    """Names of a group's parameters, if they can be found in one way only. See [Note: parameter numbers].

    Args:
        shapes: Shapes of the group's parameters, in their order; ``None``: not known.
        weights: Shapes of all weights in the state dict that may be parameters, in its order.

    Returns:
        One name for each, ``None`` if there is no way, or there are several.
    """
    items = list(weights.items())
    first = _leftmost(shapes, items)
    last = _leftmost(list(reversed(shapes)), list(reversed(items)))
    # Greedy matches from the left and from the right are equal exactly if there is only one match.
    if first is None or last is None or first != list(reversed(last)):
        return None
    return first


def _leftmost(shapes: Sequence[Shape | None], items: Sequence[tuple[str, Shape]]) -> list[str] | None:
    found: list[str] = []
    for name, shape in items:
        if len(found) < len(shapes) and shapes[len(found)] in (None, shape):
            found.append(name)
    return found if len(found) == len(shapes) else None


def named_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[Any, Shape | None], weights: Mapping[str, Shape]
) -> tuple[list[list[str]] | None, bool]:
    """Names of the parameters of each group.

    Args:
        groups: ``optimizer.state_dict()["param_groups"]``.
        shapes: Shapes by the number of a parameter, where its state tells it.
        weights: See :func:`find_parameters`.

    Returns:
        The names, ``None`` if they cannot be told; and whether they were found by their shapes.
    """
    found: list[list[str]] = []
    is_guess = False
    for group in groups:
        numbers = list(group["params"])
        if all(isinstance(number, str) for number in numbers):
            names: list[str] | None = numbers
        elif (given := group.get(NAMES, group.get("param_names"))) is not None and len(given) == len(numbers):
            names = [str(name) for name in given]
        else:
            names, is_guess = find_parameters([shapes.get(number) for number in numbers], weights), True
        if names is None:
            return None, True
        found.append(names)
    every = [name for names in found for name in names]
    if len(set(every)) != len(every) or not set(every) <= weights.keys():
        return None, is_guess
    return found, is_guess


def numbered_groups(groups: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Groups with PyTorch's numbers, and the number of each name."""
    numbers: dict[str, int] = {}
    numbered = []
    for group in groups:
        own = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        numbered.append({**group, "params": own})
    return numbered, numbers


_COMPILED: Final = "_orig_mod."


def find_prefix(names: Iterable[str]) -> str:
    """Attribute of a LightningModule that has all of the weights, with a dot at its end.

    Raises:
        CheckpointError: there are several.
    """
    names = list(names)
    found = Counter(f"{name.partition('.')[0]}." if "." in name else name for name in names)
    if len(found) != 1:
        listed = ", ".join(f"`{prefix}` ({number})" for prefix, number in found.most_common(8))
        raise CheckpointError(
            f"Which weights are those of the model cannot be told, as names begin with {listed or 'nothing'}. Say it: "
            f"`--prefix {found.most_common(1)[0][0] if found else 'model.'}`, or `--prefix ''` for all of them."
        )
    [prefix] = found
    return prefix + (_COMPILED if all(name.startswith(prefix + _COMPILED) for name in names) else "")


def strip_prefix(weights: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Weights whose names begin with ``prefix``, without it; and the names of the others.

    Raises:
        CheckpointError: no name begins with it.
    """
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        some = ", ".join(f"`{name}`" for name in list(weights)[:3])
        raise CheckpointError(f"No weight has a name that begins with `{prefix}`; there are {some or 'none at all'}.")
    return found, [name for name in weights if not name.startswith(prefix)]


def add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values under names with ``prefix`` in front."""
    return {prefix + name: value for name, value in values.items()}


def add_tied(weights: dict[str, Any], like: Mapping[str, LazyTensor]) -> list[str]:
    """Add further names of tied weights, as ``like``, a checkpoint of the same model, has them.

    Returns:
        A remark for each name that was added.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in like.items():
        if tensor.memory is not None:
            groups.setdefault(tensor.memory, []).append(name)
    said = []
    for names in groups.values():
        there = [name for name in names if isinstance(weights.get(name), LazyTensor)]
        if not there or len(there) == len(names):
            continue
        first = there[0]
        shared = replace(weights[first], memory=weights[first].memory or ("tied", first))
        weights[first] = shared
        for name in names:
            if name not in weights:
                weights[name] = shared
                said.append(f"`{name}` was added: it is tied to `{first}`.")
    return said


# Key of the strategy's state in a Lightning checkpoint.
OWN_STATE: Final = "smp_strategy"
# Key in a full file: for each optimizer, and each of its groups, the names of the parameters that PyTorch numbers.
PARAMETER_NAMES: Final = "smp_strategy/parameter_names"
MODEL_KEYS: Final = ("state_dict", "model", "module", "model_state_dict", "weights")
OPTIMIZER_KEYS: Final = ("optimizer", "optim", "optimizer_state_dict", "optimizers")


def contents_of(
    tree: Mapping[str, Any],
    *,
    kind: str,
    source: str,
    rest: Mapping[str, Any] | None = None,
    weights_at: str | None = None,
) -> CheckpointContents:
    """Recognise the entries of ``tree``.

    Args:
        tree: Nested dicts; tensors are :class:`LazyTensor`.
        kind: Kind of checkpoint, if it is not one of Lightning's.
        source: Name of the checkpoint for messages.
        rest: Other entries of a Lightning checkpoint, if they are in another file.
        weights_at: Dotted keys of the weights; ``None``: one of the usual ones.

    Raises:
        CheckpointError: there are no weights.
    """
    if weights_at is None:
        tree = _unwrapped(tree)
    taken, weights = _weights(tree, source, weights_at)
    if taken is None:
        found, others = CheckpointContents(kind=kind, weights=dict(weights)), {}
    else:
        others = {key: value for key, value in tree.items() if key != taken}
        found = CheckpointContents(kind=kind, weights=dict(weights))
    _add_optimizers(found, _take_optimizers(others), others.pop(PARAMETER_NAMES, None))
    _add_rest(found, others if rest is None else {**others, **rest})
    return found


def _add_optimizers(found: CheckpointContents, states: Sequence[tuple[str, Mapping[str, Any]]], names: Any) -> None:
    shapes = parameter_shapes(found.weights)
    for number, (where, state) in enumerate(states):
        known = names[number] if isinstance(names, list) and len(names) == len(states) else None
        optimizer = read_optimizer(_with_names(state, known), shapes, where, found.remarks)
        if optimizer is None:
            # Later optimizers would get its number.
            found.remarks += [f"`{later}` was left out, too." for later, _ in states[number + 1 :]]
            break
        found.optimizers.append(optimizer)


def _with_names(state: Mapping[str, Any], names: Any) -> Mapping[str, Any]:
    groups = state["param_groups"]
    if not isinstance(names, list) or len(names) != len(groups):
        return state
    return {
        **state,
        "param_groups": [
            {**group, NAMES: own} if len(own) == len(group["params"]) else group
            for group, own in zip(groups, names, strict=True)
        ],
    }


def _weights(tree: Mapping[str, Any], source: str, at: str | None) -> tuple[str | None, Mapping[str, Any]]:
    """First key of the weights, ``None`` if they are ``tree`` itself; and the weights."""
    if at is not None:
        found: Any = tree
        for key in at.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or not any(tensors_of(found)):
            raise CheckpointError(
                f"{source} has no weights under `{at}`. There are: {', '.join(map(str, tree)) or 'nothing'}."
            )
        return at.split(".")[0], _flat(found)
    for key in MODEL_KEYS:
        if isinstance(tree.get(key), Mapping) and any(tensors_of(tree[key])):
            return key, _flat(tree[key])
    if any(isinstance(value, LazyTensor) for value in tree.values()):
        return None, tree
    keys = [str(key) for key, value in tree.items() if isinstance(value, Mapping) and any(tensors_of(value))]
    if len(keys) == 1 and not _is_optimizer(tree[keys[0]]):
        return keys[0], _flat(tree[keys[0]])
    raise CheckpointError(
        f"{source} has no weights that can be recognised: none of {', '.join(MODEL_KEYS)} is there, but "
        f"{', '.join(map(str, tree)) or 'nothing'}. Say where they are, by `--weights KEY`."
    )


def _unwrapped(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Content of the only entry, if that has a model: applications save themselves as ``{"app": ...}``."""
    while len(tree) == 1:
        [inside] = tree.values()
        if not isinstance(inside, Mapping) or not any(isinstance(inside.get(key), Mapping) for key in MODEL_KEYS):
            break
        tree = inside
    return tree


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Names of a state dict, where a writer has nested them."""
    found = flattened(tree, opens=lambda name, value: any(tensors_of(value)) and not name.endswith("_extra_state"))
    found.pop("_smp_is_partial", None)
    return found


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def _take_optimizers(tree: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """States of optimizers with their keys; the entries are removed if ``tree`` is a dict of ours."""
    numbered = sorted((int(match[1]), key) for key in tree if (match := re.fullmatch(r"optimizer_(\d+)", str(key))))
    candidates: list[tuple[str, Any]] = [(key, tree[key]) for _, key in numbered]
    for key in ("optimizer_states", *OPTIMIZER_KEYS):
        value = tree.get(key)
        if isinstance(value, list | tuple):
            candidates += [(f"{key}[{number}]", item) for number, item in enumerate(value)]
        elif value is not None:
            candidates.append((key, value))
    found = [(key, value) for key, value in candidates if _is_optimizer(value)]
    if isinstance(tree, dict):
        for key in {key.partition("[")[0] for key, _ in found}:
            tree.pop(key, None)
    return found


def parameter_shapes(weights: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of all weights that may be parameters; tied ones, which have several names, are listed once."""
    seen: set[object] = set()
    found: dict[str, Shape] = {}
    for name, value in weights.items():
        if not isinstance(value, LazyTensor) or not value.dtype.is_floating_point:
            continue
        if value.memory is None or value.memory not in seen:
            found[name] = value.shape
            seen.add(value.memory)
    return found


def read_optimizer(
    state: Mapping[str, Any], weights: Mapping[str, Shape], where: str, remarks: list[str]
) -> OptimizerContents | None:
    """State of an optimizer by the names of its parameters.

    Args:
        state: Result of ``optimizer.state_dict()``, by numbers or by names.
        weights: Shapes of all weights that may be parameters.
        where: Key of the state, for remarks.
        remarks: Gets one if parameters are found by shapes, or not at all.
    """
    kept = {key: with_lists(value) for key, value in state["state"].items()}
    groups = [dict(group) for group in state["param_groups"]]
    names, is_guess = named_groups(groups, {key: _shape(value) for key, value in kept.items()}, weights)
    if names is None:
        remarks.append(
            f"`{where}` was left out: its parameters have numbers, and it cannot be told for certain which names these "
            "are. A sharded checkpoint has names, as has one of an optimizer made with `named_parameters()`."
        )
        return None
    if is_guess:
        remarks.append(f"`{where}` has numbers for parameters: their names were found by order and shape.")
    by_key = {
        old: name
        for group, own in zip(groups, names, strict=True)
        for old, name in zip(group["params"], own, strict=True)
    }
    strays = [str(key) for key in kept if key not in by_key]
    if strays:
        remarks.append(f"`{where}` keeps something for {', '.join(strays[:5])}, which is in none of its groups.")
    named = {by_key[key]: value for key, value in kept.items() if key in by_key}
    for group, own in zip(groups, names, strict=True):
        group.pop(NAMES, None)
        group["params"] = own
    return OptimizerContents(named, groups)


def _shape(kept: Any) -> Shape | None:
    """Shape of a parameter, if all tensors of its state that are no single numbers have one shape."""
    shapes = {tensor.shape for tensor in tensors_of(kept) if tensor.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _add_rest(found: CheckpointContents, others: Mapping[str, Any]) -> None:
    if "pytorch-lightning_version" in others:
        found.rest = dict(others)
        found.note = _note(others)
        found.kind = found.kind if found.kind.startswith("sharded") else "Lightning checkpoint"
    elif others:
        found.remarks.append(
            f"{', '.join(map(str, others))}: left out, as this is no checkpoint of Lightning, which has a place for "
            "such things."
        )


def _note(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Description of a full file, as the manifest of a folder has it."""
    own = rest.get(OWN_STATE)
    layout = own.get("layout") if isinstance(own, Mapping) else None
    counts = {key: rest[key] for key in ("global_step", "epoch") if isinstance(rest.get(key), int)}
    return {"layout": dict(layout), **counts} if isinstance(layout, Mapping) else counts
