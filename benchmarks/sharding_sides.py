"""Who takes part in benchmarks/sharding.py: the same steps of the same GPT, with parameters, gradients and optimizer
state spread over ranks in one way or another.

Peers are set up as their users would: a unit for each part of the model, the next one gathered while one computes,
forward and backward, and the last one kept in between.

``mics`` and ``hsdp`` spread parameters over the ranks of a node. In ``mics`` the replicas on the nodes deal the updates
of their shards out (``shard_optimizer_state``); in ``mics_alike``, as in ``hsdp``, each of them makes all updates.

DeepSpeed takes part where it can be imported. It wants an environment of its own.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from workloads import GPT, Batch, Chain, EngineSteps

from smp_strategy.config.config import SMPConfig

__all__ = ["Make", "Side", "num_nodes", "sides"]


class Side(Protocol):
    """One way of training."""

    def step(self) -> None:
        """Forward, backward and the optimizer's step, on the same batch again and again."""

    def weights(self) -> Iterator[Tensor]:
        """All of them, whole; collective."""

    def close(self) -> None:
        """Let go of what works in the background."""


Make = Callable[[GPT, Chain, Batch], Side]


def num_nodes() -> int:
    """How many there are, as the launcher says."""
    return dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])


def sides() -> Mapping[str, Make]:
    """Those for the ranks that there are; the first is what the weights of the others are compared with."""
    world = dist.get_world_size()
    if world == 1:
        return {"plain": Wrapped, "replicas": Ours}
    found: dict[str, Make] = {
        "ddp": Wrapped,
        "fsdp2_full": FSDP2,
        "replicas": Ours,
        "state": partial(Ours, shard_optimizer_state=True),
        "full": sharded(world),
    }
    if world >= 4:
        degree = world // max(num_nodes(), 2)
        found["hsdp"] = partial(FSDP2, degree=degree)
        found["mics"] = sharded(degree, deals_out=True)
        found["mics_alike"] = sharded(degree)
    if num_nodes() > 1:
        found["hier"] = sharded(world, in_two_hops=True)
    if importlib.util.find_spec("deepspeed"):
        found["ds_zero3"] = DeepSpeed
    elif dist.get_rank() == 0:
        print("ds_zero3 is left out: deepspeed is not installed here.", flush=True)
    return found


def optimizer_of(model: nn.Module) -> Optimizer:
    """Moments are divided by what is never tiny, so that wrong gradients, and wrongly scaled ones, give other weights,
    and gradients that are added up in another order do not."""
    return AdamW(model.parameters(), 1e-3, eps=1e-3, fused=True)


class Wrapped:
    """A plain loop, with DistributedDataParallel where there are several ranks."""

    def __init__(self, workload: GPT, model: Chain, batch: Batch) -> None:
        self._model, self._loss, self._batch = model, workload.loss, batch
        self._wrapped: nn.Module = model
        if dist.get_world_size() > 1:
            self._wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = optimizer_of(model)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._wrapped(self._batch[0]), self._batch[1]).backward()
        self._optimizer.step()

    def weights(self) -> Iterator[Tensor]:
        yield from self._model.parameters()

    def close(self) -> None:
        pass


class FSDP2:
    """``fully_shard`` over groups of ``degree`` ranks, by default over all."""

    def __init__(self, workload: GPT, model: Chain, batch: Batch, degree: int | None = None) -> None:
        self._model, self._loss, self._batch = model, workload.loss, batch
        mesh = self._mesh(degree)
        *others, last = parts = list(model.parts)
        for part in others:
            fully_shard(part, mesh=mesh)
        fully_shard(last, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        for part, following in zip(others, parts[1:], strict=True):
            part.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([part])
        # Without this, nothing is gathered in the background where there are no streams.
        model._set_unshard_async_op(True)
        self._optimizer = optimizer_of(model)

    def _mesh(self, degree: int | None) -> DeviceMesh:
        world = dist.get_world_size()
        if degree is None:
            return init_device_mesh("cpu", (world,))
        return init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("replicate", "shard"))

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._model(self._batch[0]), self._batch[1]).backward()
        self._optimizer.step()

    def weights(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            assert isinstance(parameter, DTensor)
            yield parameter.full_tensor()

    def close(self) -> None:
        pass


class DeepSpeed:
    """ZeRO-3 with its defaults, but for clipping, and gradients in buckets of 25 MB instead of 2 GB."""

    def __init__(self, workload: GPT, model: Chain, batch: Batch) -> None:
        self._model, self._loss, self._batch = model, workload.loss, batch
        self._deepspeed = importlib.import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": len(batch[0]),
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 25 * 2**18},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        self._deepspeed.init_distributed("gloo", verbose=False)
        self._engine = self._deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]

    def step(self) -> None:
        self._engine.backward(self._loss(self._engine(self._batch[0]), self._batch[1]))
        self._engine.step()

    def weights(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            with self._deepspeed.zero.GatheredParameters([parameter]):
                yield parameter.detach().clone()

    def close(self) -> None:
        self._engine.destroy()


class Ours(EngineSteps):
    """An engine with the given options."""

    def __init__(self, workload: GPT, model: Chain, batch: Batch, **options: Any) -> None:
        config = SMPConfig(pipeline_parallel_degree=1, **options)
        super().__init__(workload, model, optimizer_of(model), batch, config)

    def weights(self) -> Iterator[Tensor]:
        found: list[Tensor] = self.engine.run_hook(
            lambda: [parameter.detach().clone() for parameter in self.model.parameters()]
        )
        yield from found

    def close(self) -> None:
        self.engine.close()


def sharded(degree: int, *, in_two_hops: bool = False, deals_out: bool = False) -> Make:
    """An engine that spreads parameters over ``degree`` neighbouring ranks."""
    return partial(
        Ours,
        sharded_data_parallel_degree=degree,
        sdp_hierarchical_allgather=in_two_hops,
        shard_optimizer_state=deals_out,
    )
