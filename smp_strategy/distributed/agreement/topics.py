"""Topics: everything that ranks must have alike and note in a ledger, with the errors that tell of a difference."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

from smp_strategy.distributed.agreement.common_settings import Settings, differences, explained
from smp_strategy.distributed.agreement.ledger import Topic
from smp_strategy.distributed.agreement.same_inputs import are_alike, refused
from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import ConfigError, SMPError, UnsupportedError

__all__ = [
    "CARRIED_REASON",
    "CALL_INPUTS",
    "INPUTS",
    "META_TENSORS",
    "MODEL",
    "NUM_BATCHES",
    "PROGRAM",
    "SETTINGS",
    "SPLIT_LAYERS",
    "UNIT_ARGUMENTS",
    "UPDATE",
    "refused_meta",
]

CARRIED_REASON: Final = (
    "If code above the units asks such an object, which units change, each stage knows what its own units have put "
    "there: the length of a cache, say. Leave the cache out (`use_cache=False`), or pass what depends on "
    "it to the model (`position_ids`, say)."
)
"""Reason for different arguments of units, and remedy."""


def _different_settings(values: Mapping[int, Settings]) -> SMPError:
    return ConfigError(explained([dict(each) for each in values.values()]))


def _different_update(values: Mapping[int, Mapping[str, object]]) -> SMPError:
    """The first setting that differs, with its values."""
    name, found = next(iter(differences([dict(each) for each in values.values()]).items()))
    told = [f"{value!r} on rank {rank}" for rank, value in enumerate(found)]
    return SMPError(
        f"The last update had other settings on some ranks: {name} is {', '.join(told)}. A scheduler or callback "
        "that goes by a value of one rank's own samples, such as `ReduceLROnPlateau`, is the usual reason: average the "
        f"value over all ranks before ({door_words().average}). The weights are a mixture: load a checkpoint."
    )


def refused_meta(name: str) -> SMPError:
    """Error about the tensor ``name``, which has no values."""
    return ConfigError(
        f"`{name}` is on the meta device and has no values. Set `delayed_parameter_initialization=True`, so that "
        "every rank gives values to its own share of the model, or build the model on a real device."
    )


def _different_meta(values: Mapping[int, tuple[bool, Sequence[str]]]) -> SMPError:
    some = next(names[0] for _, names in values.values() if names)
    if not all(may_lack_values for may_lack_values, _ in values.values()):
        return refused_meta(some)
    return SMPError(
        f"Ranks have different tensors on the meta device: `{some}`, for example; by rank, so many: "
        f"{[len(names) for _, names in values.values()]}. Build the same model on every rank."
    )


def _different_model(values: Mapping[int, Sequence[tuple[str, str]]]) -> SMPError:
    rank = next(rank for rank, described in values.items() if described != values[0])
    pairs = zip_longest(values[0], values[rank], fillvalue=("nothing", "which it has not"))
    (mine, is_so), (theirs, is_other) = next((one, other) for one, other in pairs if one != other)
    return SMPError(
        f"Ranks have different models: where rank 0 has `{mine}` ({is_so}), rank {rank} has `{theirs}` ({is_other}). "
        "Build the same model on every rank, and freeze the same parameters."
    )


def _different_splits(values: Mapping[int, Sequence[tuple[str, str]]]) -> SMPError:
    first, *others = values.values()
    number, other = next((number, other) for number, other in enumerate(others, 1) if other != first)
    return ConfigError(
        f"Ranks 0 and {number} of a tensor-parallel group would split layers differently "
        f"({sorted(set(other) ^ set(first))[:2]}). Build the same module, and say the same of it, on all ranks."
    )


def _different_inputs(values: Mapping[int, tuple[str, int, int]]) -> SMPError:
    (first, (doing, *mine)), *others = values.items()
    rank, shapes = next((rank, shapes) for rank, (_, shapes, number) in others if [shapes, number] != mine)
    return refused(doing, (first, rank), has_other_shapes=shapes != mine[0])


def _different_call_inputs(values: Mapping[int, Sequence[tuple[str, int, float]]]) -> SMPError | None:
    """The error for a call whose tensors have other values on some rank.

    A tensor may be plain on one rank and on another stage for the next one. That rank has no digest of it, or one of
    fewer tensors, which is no difference.
    """
    found: dict[tuple[str, tuple[int, ...]], tuple[int, list[float]]] = {}
    for rank, calls in values.items():
        for name in dict.fromkeys(name for name, *_ in calls):
            digests = [(shapes, number) for other, shapes, number in calls if other == name]
            shapes, numbers = tuple(shapes for shapes, _ in digests), [number for _, number in digests]
            first, expected = found.setdefault((name, shapes), (rank, numbers))
            if numbers != expected and not all(map(are_alike, shapes, numbers, expected)):
                return refused(name, (first, rank), has_other_shapes=False)
    return None


def _different_program(values: Mapping[int, str]) -> SMPError:
    calls = zip_longest(*(each.split("\n") for each in values.values()), fillvalue="the end of the step")
    number, differing = next((n, call) for n, call in enumerate(calls) if len(set(call)) > 1)
    what = ", ".join(f"`{name}` on rank {rank}" for rank, name in sorted(zip(values, differing, strict=True)))
    words = door_words()
    return UnsupportedError(
        f"The ranks of this pipeline did not run the same code in this step: call {number} is {what}. A value that "
        f"only some ranks read (`{words.on_one}print(loss.item())`) or a branch on the rank is the usual "
        f"reason: do it on all ranks, or use {words.tell}."
    )


def _different_arguments(values: Mapping[int, Mapping[int, Sequence[str]]]) -> SMPError:
    """Error about calls of units, by rank and microbatch."""
    found = [dict(each) for each in values.values()]
    for microbatch in dict.fromkeys(microbatch for each in found for microbatch in each):
        calls = zip_longest(*(each.get(microbatch, ()) for each in found), fillvalue="no call")
        different = next((call for call in calls if len(set(call)) > 1), None)
        if different is not None:
            break
    assert different is not None
    return UnsupportedError(
        "A unit is called with other arguments on one stage than on another "
        f"({' and '.join(different)}; shapes, and sums of whole numbers). {CARRIED_REASON}"
    )


def _different_numbers_of_batches(values: Mapping[int, str]) -> SMPError:
    return SMPError(
        f"With `prescaled_batch=False` a step needs samples of all ranks of a tensor-parallel group, but they "
        f"do not have the same number of batches ({', '.join(map(str, values.values()))}). Let the dataset give each "
        "rank as many, as data-parallel training needs it as well."
    )


SETTINGS: Final = Topic("settings", _different_settings)
META_TENSORS: Final = Topic("meta tensors", _different_meta)
MODEL: Final = Topic("model", _different_model)
SPLIT_LAYERS: Final = Topic("split layers", _different_splits)
UPDATE: Final = Topic("update", _different_update)
INPUTS: Final = Topic("inputs", _different_inputs)
CALL_INPUTS: Final = Topic("inputs of calls", _different_call_inputs)
PROGRAM: Final = Topic("program", _different_program)
UNIT_ARGUMENTS: Final = Topic("arguments of units", _different_arguments)
NUM_BATCHES: Final = Topic("number of batches", _different_numbers_of_batches)
