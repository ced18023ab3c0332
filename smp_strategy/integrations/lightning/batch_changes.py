"""Changes that a step makes to its batch, for hooks that get the batch afterwards.

Lightning passes the batch of the step on to hooks like ``on_train_batch_end``. They see items that the step has set,
replaced or removed. Here the step gets microbatches. Their changes are results of the step, and are merged into the
batch as other results are. This happens only if a hook outside of Lightning may look at the batch.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from smp_strategy.pipeline.join_results import merge

__all__ = ["BatchChanges", "apply_changes", "changes_of", "contents_of", "is_looked_at"]


class BatchChanges(NamedTuple):
    """Changes of one microbatch, by key, index or attribute."""

    new: dict[Any, Any]
    gone: frozenset[Any]


def is_looked_at(module: Any, hook: str) -> bool:
    """Whether ``hook`` of the module or of a callback that is not Lightning's may look at the batch."""
    kinds = [type(module), *map(type, module.trainer.callbacks)]
    hooks = [getattr(kind, hook, None) for kind in kinds]
    names = [getattr(each, "__module__", "") for each in hooks if each is not None]
    return any(name.partition(".")[0] not in ("lightning", "pytorch_lightning") for name in names)


def contents_of(batch: Any) -> dict[Any, Any]:
    """Values of a container or an object, by key, index or attribute; others have none."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list):
        return dict(enumerate(batch))
    return {} if isinstance(batch, Tensor) else dict(getattr(batch, "__dict__", {}))


def changes_of(batch: Any, before: Mapping[Any, Any]) -> BatchChanges | None:
    """How ``batch`` differs from its contents ``before``; ``None``: not at all."""
    after = contents_of(batch)
    new = {key: value for key, value in after.items() if key not in before or value is not before[key]}
    gone = frozenset(before.keys() - after.keys())
    return BatchChanges(new, gone) if new or gone else None


def apply_changes(batch: Any, changes: Sequence[BatchChanges | None], sizes: Sequence[int]) -> None:
    """Change ``batch`` as its microbatches have been changed.

    Args:
        batch: Batch of the step.
        changes: Changes of each microbatch, with real tensors.
        sizes: Number of samples in each microbatch.
    """
    found = [(each, size) for each, size in zip(changes, sizes, strict=True) if each is not None]
    if not found:
        return
    new = merge([each.new for each, _ in found], [size for _, size in found])
    gone = frozenset[Any]().union(*(each.gone for each, _ in found)) - new.keys()
    if isinstance(batch, list):
        # Its indices have no gaps: what has gone was at the end, what is more than before as well.
        end = min(gone, default=max([len(batch), *(index + 1 for index in new)]))
        batch[:] = [new[index] if index in new else batch[index] for index in range(end)]
        return
    target = batch if isinstance(batch, MutableMapping) else vars(batch)
    target.update(new)
    for key in gone:
        target.pop(key, None)
