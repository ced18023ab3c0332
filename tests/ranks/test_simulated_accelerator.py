"""Training on simulated accelerators, whose streams lag behind, gives the bits of the CPU; without a wait it does not.

The process groups are made beforehand, in every way: for the accelerator alone (as of ``nccl``), bound to a device
(``device_id``), for the host as well.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smp_strategy.activations import offload
from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.flat_buffer import FlatBuffer
from smp_strategy.distributed import host_copies
from smp_strategy.distributed.handle import Handle
from smp_strategy.distributed.host_copies import HostCopies, Landed
from smp_strategy.distributed.process_groups import carry_host_tensors
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests import simulated
from tests.parity.models import Text, batch_for

Trained = tuple[dict[str, Tensor], list[float]]


@pytest.fixture(scope="module")
def library() -> Path:
    return simulated.build()


def train(options: dict[str, Any], device: torch.device, change: Callable[[], None] = lambda: None) -> Trained:
    """Train for three steps; ``change`` is called after the first one."""
    torch.manual_seed(0)
    model = Text(dropout=0.1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(SMPConfig(microbatches=4, **options), device=device)
    engine.attach(model, [optimizer])
    losses = []
    for step in range(3):
        batch = batch_for("text", step * engine.mesh.dp + engine.mesh.dp_rank, 8)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones((), device=device), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
        if step == 0:
            change()
    return {name: tensor.cpu() for name, tensor in engine.saved.full_state_dict().items()}, losses


def on_the_host(options: dict[str, Any]) -> Trained:
    return train(options, torch.device("cpu"))


def on_accelerators(
    options: dict[str, Any],
    library: Path,
    backend: str,
    bound: bool,
    seed: int,
    change: Callable[[], None] = lambda: None,
) -> Trained:
    simulated.load(library)
    simulated.lag(seed)
    device = simulated.join(backend, bound=bound)
    carry_host_tensors(device.type)
    given = dist.distributed_c10d._get_default_group()
    found = train(options, device, change)
    assert dist.distributed_c10d._get_default_group() is given
    assert given.bound_device_id == (device if bound else None)
    return found


PIPELINE = {"pipeline_parallel_degree": 2}
SHARDED = {"sharded_data_parallel_degree": 2}
OFFLOAD = {**PIPELINE, "offload_activations": True, "offload_min_bytes": 0}


@pytest.mark.parametrize(
    ("ranks", "options", "backend", "bound", "seed"),
    [
        (2, OFFLOAD, "simulated", True, 0),
        (2, SHARDED, "cpu:gloo,simulated:like_gloo", False, 1),
        (2, {"tensor_parallel_degree": 2}, "simulated", False, 0),
        (4, PIPELINE, "simulated", False, 1),
        (4, {**PIPELINE, **SHARDED}, "simulated", True, 0),
    ],
    ids=str,
)
def test_training_on_groups_made_beforehand(library, ranks, options, backend, bound, seed):
    expected = run_ranks(on_the_host, ranks, options)
    found = simulated.run_clean(run_ranks, on_accelerators, ranks, options, library, backend, bound, seed)
    for (state, losses), (other, other_losses) in zip(expected, found, strict=True):
        assert other_losses == losses
        assert list(other) == list(state)
        assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def copies_wait_for_nothing() -> None:
    copy = host_copies._copy
    host_copies._copy = lambda stream, source, target, after: copy(stream, source, target, [])


def received_tensors_are_not_waited_for() -> None:
    Landed.use = lambda self: self.tensor


def computation_does_not_wait_for_copies() -> None:
    HostCopies.wait = lambda self, event: None


def gathered_weights_are_not_waited_for() -> None:
    wait = FlatBuffer.wait

    def go_on(self: FlatBuffer) -> None:
        if self._arriving is not None:
            self._arriving = Handle(lambda: None)
        wait(self)

    FlatBuffer.wait = go_on


@pytest.mark.parametrize(
    ("removal", "options"),
    [
        (received_tensors_are_not_waited_for, PIPELINE),
        (copies_wait_for_nothing, {**OFFLOAD, "pipeline_parallel_degree": 1}),
        (computation_does_not_wait_for_copies, {**OFFLOAD, "pipeline_parallel_degree": 1}),
        (gathered_weights_are_not_waited_for, SHARDED),
    ],
    ids=["to the device", "offload", "loaded activations", "gathers"],
)
def test_a_missing_wait_gives_wrong_numbers(library, removal, options):
    ranks = 1 if options.get("pipeline_parallel_degree") == 1 else 2
    expected = run_ranks(on_the_host, ranks, options)
    found = simulated.run_clean(run_ranks, on_accelerators, ranks, options, library, "simulated", False, 0, removal)
    for (_, losses), (_, others) in zip(expected, found, strict=True):
        assert others[0] == losses[0]
        assert others[1:] != losses[1:]


BLOCKS = 12
CHECKPOINT = {"pipeline_parallel_degree": 1, "microbatches": 1, "activation_checkpointing": "all"}
HORIZON = 2
# Calls whose copies are under way, calls that wait for their turn, and the last ones, whose backward follows at once.
MOST_ON_THE_DEVICE = offload.MOST_LEAVING + offload.MOST_WAITING + HORIZON


class Watched(nn.Module):
    """A block that notes its inputs, and how many of them are alive when the first backward begins."""

    def __init__(self, seen: list[StorageWeakRef], alive: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen, self.alive = seen, alive

    def forward(self, x: Tensor) -> Tensor:
        if not self.alive:
            self.seen.append(StorageWeakRef(x.untyped_storage()))
        return torch.tanh(self.linear(x))


class WatchedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StorageWeakRef] = []
        self.alive: list[int] = []
        self.blocks = nn.ModuleList(Watched(self.seen, self.alive) for _ in range(BLOCKS))

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + 0)  # an input of its own
        loss = x.square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.alive.append(sum(not each.expired() for each in self.seen)))
        return loss


def inputs_alive(options: dict[str, Any], library: Path, seed: int) -> list[int]:
    """Of each step, how many inputs of its blocks are on the device as backward begins."""
    simulated.load(library)
    simulated.lag(seed)
    device = simulated.join("simulated")
    carry_host_tensors(device.type)
    torch.manual_seed(0)
    module = WatchedBlocks().to(device)
    engine = Engine(SMPConfig(**options), device=device)
    engine.attach(module)
    found = []
    for _ in range(3):
        module.seen.clear()
        module.alive.clear()
        result = engine.train_step(module.loss, torch.randn(4, 8).to(device), loss_of=lambda loss: loss)
        result.commit(torch.ones((), device=device), reduce=True)
        assert len(module.seen) == BLOCKS
        found += module.alive
    engine.close()
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_inputs_of_checkpointed_blocks_leave_the_device(library, seed):
    """Checkpointing keeps the input of each block; with offload only those of the last few are on the device."""
    [kept] = simulated.run_clean(run_ranks, inputs_alive, 1, CHECKPOINT, library, seed)
    assert kept == [BLOCKS] * 3
    leaves = {"offload_activations": True, "offload_min_bytes": 0, "activation_loading_horizon": HORIZON}
    [left] = simulated.run_clean(run_ranks, inputs_alive, 1, CHECKPOINT | leaves, library, seed)
    assert max(left) <= MOST_ON_THE_DEVICE, left


def test_a_message_that_is_sent_before_it_is_copied_is_garbage(library):
    # Either the garbage of a header is refused as the strides of a tensor, or memory is overwritten and a rank dies.
    with pytest.raises(RuntimeError, match=r"strides=\[-1|ended without a result"):
        simulated.run_clean(
            run_ranks, on_accelerators, 2, PIPELINE, library, "simulated", False, 0, copies_wait_for_nothing
        )
