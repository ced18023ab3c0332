"""Communication hooks of DistributedDataParallel, as options: which dtype gradients are sent in, and in which hops.

A hook of the user's own would get buckets of gradients to reduce as it likes. Here reductions also run over stages and
shards, with buckets of their own, so only PyTorch's hooks that change the dtype are taken over, and the hierarchical
one of this package.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.ddp_comm_hook import hierarchical_allreduce_hook
from smp_strategy.errors import UnsupportedError

__all__ = ["options_for"]


def options_for(hook: Callable[..., Any], config: SMPConfig) -> SMPConfig:
    """``config`` with what ``hook`` does.

    Raises:
        UnsupportedError: it is neither one of PyTorch's nor :func:`hierarchical_allreduce_hook`.
    """
    if hook is default_hooks.allreduce_hook:
        return config
    if hook is default_hooks.fp16_compress_hook:
        return dataclasses.replace(config, reduce_dtype="float16")
    if hook is default_hooks.bf16_compress_hook:
        return dataclasses.replace(config, reduce_dtype="bfloat16")
    if hook is hierarchical_allreduce_hook:
        return dataclasses.replace(config, ddp_reduction="hierarchical")
    name = getattr(hook, "__name__", type(hook).__name__)
    raise UnsupportedError(
        f"`register_comm_hook` got `{name}`, but gradients are summed over stages and shards as well, in buckets "
        "that a hook of DistributedDataParallel does not know. Use `allreduce_hook`, `fp16_compress_hook` or "
        "`bf16_compress_hook` of PyTorch, or change gradients between the step and `optimizer.step()`."
    )
