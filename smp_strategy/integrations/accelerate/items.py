"""``num_items_in_batch``, for a microbatch.

Models of Transformers take the number of labels in all that an optimizer's step sees, so that the loss of each batch
can be a sum over it divided by that number, and the losses of several batches add up. But most of them take any keyword
argument, pass this one on, and average over what they are given. From outside it cannot be told which they do.

So a microbatch gets its share of the number, by its samples, and losses are averaged over the samples as ever. With
``S_i`` the sum over microbatch ``i``, ``w_i`` its part of the samples and ``N`` the number, that is for the first kind
``sum(w_i * S_i / (w_i * N)) = S / N``, exactly where ``w_i`` is a power of two, and for the second kind what it is for
all other models.
"""

from collections.abc import Mapping
from typing import Any

from smp_strategy.model.samples import Samples, samples_in

__all__ = ["NAME", "with_share_of_items"]

NAME = "num_items_in_batch"


def with_share_of_items(kwargs: Mapping[str, Any], microbatch: Any, samples: Samples) -> Mapping[str, Any]:
    """``kwargs`` of a call for ``microbatch``, with its share of the number of items, if they name one.

    Args:
        kwargs: keyword arguments of the model.
        microbatch: what it is called with, cut out of what one or more ranks have read.
        samples: of the call, with what this rank has read.
    """
    items = kwargs.get(NAME)
    if items is None:
        return kwargs
    mine, whole = samples_in(microbatch, samples), samples.number
    if not mine or not whole or mine == whole:
        return kwargs
    return {**kwargs, NAME: items * (mine / whole)}
