"""Replicas on two nodes with a slow link, beside torch's DistributedDataParallel; ``data_parallel.py --nodes`` runs::

    benchmarks/netlab.sh --rate 200mbit python benchmarks/data_parallel_nodes.py [--quick]   # root

A step is forward, backward and AdamW of a GPT. All sides have the same weights and batches, and take turns in the same
processes; a turn is that of ``sharding.py``. Before anything is timed, the weights of all sides are compared.

* ``hierarchical``: an engine, whose sums are hierarchical.
* ``hook``: DistributedDataParallel with ``hierarchical_allreduce_hook``.

The last line is JSON: ``hierarchical_vs_ddp`` and ``hook_vs_ddp`` (step times over those of DistributedDataParallel,
the median over rounds), ``slow_link_bytes_over_bound`` (bytes that a node sends in a step of the engine, over those of
all gradients, the least that an all-reduce between two nodes can do), and the same of DistributedDataParallel.
"""

import copy
import json
import sys
from collections.abc import Mapping
from statistics import median

import torch
import torch.distributed as dist
from sharding import turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from workloads import GPT, Batch, EngineSteps

from smp_strategy import HierarchicalAllReduceState, SMPConfig, hierarchical_allreduce_hook

# Values that are never tiny divide the moments, so that sums in another order do not give other weights.
LEARNING_RATE, EPSILON, WARM_UPS = 1e-3, 1e-3, 2
USUAL, QUICK = GPT(8192, separates_ends=True, length=64), GPT(256, separates_ends=True, length=16, width=48)


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), LEARNING_RATE, eps=EPSILON)


class Wrapped:
    """DistributedDataParallel."""

    def __init__(self, workload: GPT, model: nn.Module, batch: Batch, *, has_hook: bool) -> None:
        self.model, self._loss, self._batch = model, workload.loss, batch
        self._wrapped, self._optimizer = DistributedDataParallel(model), optimizer_of(model)
        self._state = HierarchicalAllReduceState() if has_hook else None
        if self._state is not None:
            self._wrapped.register_comm_hook(self._state, hierarchical_allreduce_hook)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._wrapped(self._batch[0]), self._batch[1]).backward()
        self._optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def close(self) -> None:
        if self._state is not None:
            self._state.close()


class Ours(EngineSteps):
    """An engine."""

    def __init__(self, workload: GPT, model: nn.Module, batch: Batch) -> None:
        config = SMPConfig(pipeline_parallel_degree=1, ddp_reduction="hierarchical")
        super().__init__(workload, model, optimizer_of(model), batch, config)

    def weights(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def close(self) -> None:
        self.engine.close()


def measure(workload: GPT, rounds: int) -> Mapping[str, float]:
    """The last line; on every rank."""
    torch.manual_seed(0)
    model = workload.model()
    torch.manual_seed(dist.get_rank())
    batch = workload.batch(1)
    sides: dict[str, Wrapped | Ours] = {
        "ddp": Wrapped(workload, copy.deepcopy(model), batch, has_hook=False),
        "hierarchical": Ours(workload, copy.deepcopy(model), batch),
        "hook": Wrapped(workload, copy.deepcopy(model), batch, has_hook=True),
    }
    for side in sides.values():
        for _ in range(WARM_UPS):
            side.step()
        for mine, theirs in zip(side.weights(), sides["ddp"].weights(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds, sent = turn(sides[name], 1)
            assert sent is not None, "there is a link"
            turns[name].append((seconds, sent))
            if dist.get_rank() == 0:
                print(f"{name:14} {seconds:6.2f} s {sent / 1e6:7.1f} MB", flush=True)
    for side in sides.values():
        side.close()
    gradients = sum(parameter.nbytes for parameter in model.parameters())

    def ratio(name: str) -> float:
        return median(ours / theirs for (ours, _), (theirs, _) in zip(turns[name], turns["ddp"], strict=True))

    def bytes_over_bound(name: str) -> float:
        return median(sent for _, sent in turns[name]) / gradients

    found = {
        "hierarchical_vs_ddp": ratio("hierarchical"),
        "hook_vs_ddp": ratio("hook"),
        "slow_link_bytes_over_bound": bytes_over_bound("hierarchical"),
        "ddp_bytes_over_bound": bytes_over_bound("ddp"),
    }
    return {name: round(value, 4) for name, value in found.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_quick = "--quick" in sys.argv
    last = measure(QUICK if is_quick else USUAL, 1 if is_quick else 3)
    if dist.get_rank() == 0:
        print(json.dumps(last))
    dist.barrier()
    dist.destroy_process_group()
