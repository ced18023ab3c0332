"""Notes on layers and losses whose numbers depend on how a batch is cut into microbatches.

A step has the numbers of a single process that accumulates gradients over the same microbatches. That is a step on the
whole batch if each sample counts for itself and the loss is a mean. What is visible in modules and is otherwise gets a
sentence at the first training step, since nothing else would tell.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.loss import _Loss

from smp_strategy.config.sizes import show_count
from smp_strategy.errors import MORE, SMPError
from smp_strategy.model.samples import Path, is_array, is_list, shown_path, visited
from smp_strategy.pipeline.microbatch import holds_arrays

__all__ = [
    "note_on_comparison",
    "note_on_whole_batches",
    "notes_on_buffers",
    "notes_on_microbatches",
    "notes_on_objects",
    "told_of_microbatches",
]

# Words of errors about shapes, of torch and of users.
_OF_SHAPES: Final = re.compile(r"\b(sizes?|shapes?|dimensions?|lengths?|out of (?:range|bounds))\b", re.IGNORECASE)


@contextmanager
def told_of_microbatches(sizes: Sequence[int]) -> Iterator[None]:
    """Context of a step: an error of its code about shapes says that the step sees parts of the batch."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if len(sizes) > 1 and not isinstance(error, SMPError) and _OF_SHAPES.search(str(error)):
            error.add_note(
                f"The step sees {_sizes(sizes)} at a time, of the {sum(sizes)} of the batch. What is taken from a part "
                "of them (`lengths.max()`) may be smaller than that of the batch: take it from the shape of a padded "
                f"tensor, or set `microbatches=1`. {MORE}305"
            )
        raise


def notes_on_microbatches(module: nn.Module, sizes: Sequence[int], *, averages: bool) -> Iterator[str]:
    """Sentences on layers and losses of ``module``, which is about to train."""
    if len(sizes) < 2:
        return
    parts = [(name, part) for name, part in module.named_modules() if part.training]
    norms = [(name, part) for name, part in parts if isinstance(part, _NormBase) and _sees_others(part)]
    if norms:
        is_tracked = any(part.track_running_stats for _, part in norms)
        yield (
            f"{_named(norms)} normalize by the statistics of each microbatch ({_sizes(sizes)}) instead of the batch's "
            f"({show_count(sum(sizes), 'sample')}), as under gradient accumulation"
            + (f"; running statistics move {len(sizes)} times per step, each time by `momentum`" if is_tracked else "")
            + ". For the numbers of the whole batch set `microbatches=1`, or use a norm of each sample (LayerNorm, "
            "GroupNorm)."
        )
    sums = [(name, part) for name, part in parts if isinstance(part, _Loss) and part.reduction == "sum"]
    if sums and averages:
        yield (
            f"{_named(sums)} add up the losses of samples (`reduction='sum'`), but the losses of the {len(sizes)} "
            "microbatches are averaged, weighted by samples, as under gradient accumulation: a loss like that is not "
            f"the sum over the batch, but about 1/{len(sizes)} of it. Use `reduction='mean'`, or set `microbatches=1`."
        )


def note_on_whole_batches(reason: Exception) -> str:
    """Sentence on batches that cannot be cut, where nobody has asked for microbatches."""
    return f"Batches are not cut into microbatches, and stages do not overlap. {reason}"


def note_on_comparison(operation: str, sizes: Sequence[int], *, num_stages: int, takes_whole: bool) -> str:
    """Sentence on a loss that compares the samples of its batch by an ``operation``, and whose batches are not cut from
    now on if it ``takes_whole``.
    """
    whole = show_count(sum(sizes), "sample")
    if takes_whole:
        return (
            f"The loss compares samples of its batch: {operation}. So batches ({whole}) are not cut into microbatches, "
            "which would have fewer samples to compare, and stages do not overlap. Set `microbatches` if the loss of "
            "microbatches is meant."
        )
    # Of equal stages, beside a schedule with the idle time of 1F1B.
    factor = num_stages * len(sizes) / (len(sizes) + num_stages - 1)
    overlap = f"stages do not overlap (a step of {num_stages} equal stages takes {factor:.1f} times as long), and "
    return (
        f"The loss compares samples of its batch: {operation}. With {len(sizes)} microbatches it is computed in each "
        f"microbatch ({_sizes(sizes)}) instead of the batch ({whole}), so it is another loss, and may be 0 in a "
        f"microbatch of one sample. For the loss of the whole batch set `microbatches=1`: then "
        f"{overlap if num_stages > 1 else ''}the activations of the whole batch are in memory at once."
    )


def notes_on_objects(microbatches: Sequence[Any]) -> Iterator[str]:
    """Sentence on objects with tensors that ``microbatches`` of one batch share.

    An object that nobody can cut may belong to all samples (the graph of a road network) or hold them in its own way.
    In the second case broadcasting can hide that each microbatch computes with all of them.
    """
    if len(microbatches) < 2:
        return
    shared = set[int]()
    visited(microbatches[0], (), lambda path, leaf: shared.add(id(leaf)))
    found: list[str] = []

    def see(path: Path, leaf: Any) -> None:
        if id(leaf) in shared and not (is_array(leaf) or is_list(leaf)) and holds_arrays(leaf):
            found.append(f"{shown_path(path)} ({type(leaf).__name__})")

    visited(microbatches[1], (), see)
    if found:
        yield (
            f"{found[0]}{f' and {len(found) - 1} more' * (len(found) > 1)} holds tensors, none of them with an entry "
            f"per sample, and cannot be cut: each of the {len(microbatches)} microbatches gets all of it. If it has "
            "the samples in a way of its own, give its class a method `smp_slice(num_microbatches, microbatch, axis)`, "
            "or set `microbatches=1`."
        )


def notes_on_buffers(module: nn.Module, written: Collection[str], *, replicas: int, microbatches: int) -> Iterator[str]:
    """Sentence on the buffers ``written`` by layers of ``module`` while they train, which ``replicas`` share:
    codebooks, queues, running means.
    """
    modules = dict(module.named_modules())
    names = [name for name in sorted(written) if not isinstance(modules.get(name.rpartition(".")[0]), _NormBase)]
    if not names or (replicas < 2 and microbatches < 2):
        return
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    seen = [f"a step updates them {microbatches} times, once per microbatch"] if microbatches > 1 else []
    if replicas > 1:
        seen.append(
            f"each of the {replicas} replicas updates them by its own samples, and after the step all take over those "
            "of the first, as under DistributedDataParallel"
        )
    yield (
        f"Buffers like `{names[0]}`{more} are updated by layers in training: {'; '.join(seen)}. One process that sees "
        "the whole batch updates them otherwise."
    )


def _sees_others(norm: _NormBase) -> bool:
    """Whether the samples of a microbatch change each other's results, or a running mean."""
    return isinstance(norm, _BatchNorm) or norm.track_running_stats


def _named(parts: Sequence[tuple[str, nn.Module]]) -> str:
    name, first = parts[0]
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return f"Layers like `{name or 'the model'}` ({type(first).__name__}){more}"


def _sizes(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return show_count(most, "sample") if least == most else f"{least} to {most} samples"
