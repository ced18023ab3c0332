"""Messages and collectives of accelerators, which go by way of the host, on doubles.

A copy of the double is put off until its event is waited for, as one on a stream may be; its target holds other numbers
until then.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import smp_strategy.distributed.collectives.host_staged as staged
import smp_strategy.distributed.collectives.interface as collectives
import smp_strategy.pipeline.transport.channel as channel
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.host_copies import Landed, OnHost
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import Text, batch_for


class Event:
    """Of a copy that is put off."""

    num_put_off = 0

    def __init__(self, source: Tensor, target: Tensor) -> None:
        Event.num_put_off += 1
        self._copy = lambda: target.copy_(source)

    def synchronize(self) -> None:
        self._copy()
        self._copy = lambda: None


class Arrived(Landed):
    """Lets nobody see the tensor before its copy is done."""

    def use(self) -> Tensor:
        self.copied.synchronize()
        return self.tensor


class Copies:
    """Of the memory of the host, as if it were a device's."""

    def __init__(self, device: torch.device) -> None:
        pass

    def memory(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def out(self, tensor: Tensor) -> OnHost:
        memory = self.memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return OnHost(memory, Event(tensor.detach(), memory))

    def back(self, memory: Tensor) -> Landed:
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.full_like(memory, -1)
            return Arrived(tensor, Event(memory, tensor))


def by_way_of_the_host(options: dict[str, Any], patched: bool) -> tuple[dict[str, Tensor], list[float], int]:
    if patched:
        for module in (channel, collectives, staged):
            module.is_host = lambda device: False
        channel.HostCopies = staged.HostCopies = Copies
        channel.messages.on_host = replace
    torch.manual_seed(0)
    model = Text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(SMPConfig(microbatches=4, stage_transport="gloo", **options))
    engine.attach(model, [optimizer])
    losses = []
    for step in range(3):
        batch = batch_for("text", step * engine.mesh.dp + engine.mesh.dp_rank, 8)
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
    return engine.saved.full_state_dict(), losses, Event.num_put_off


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pipeline_parallel_degree": 2}),
        (4, {"pipeline_parallel_degree": 4, "pipeline": "zb-h1"}),
        (2, {"sharded_data_parallel_degree": 2}),
        (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
        (4, {"sharded_data_parallel_degree": 2}),
    ],
    ids=str,
)
def test_what_goes_by_way_of_the_host_arrives_bit_for_bit(ranks, options):
    direct, staged_ = (
        run_ranks(by_way_of_the_host, ranks, options, False),
        run_ranks(by_way_of_the_host, ranks, options, True),
    )
    for (expected, losses, num_none), (found, found_losses, num_put_off) in zip(direct, staged_, strict=True):
        assert num_none == 0
        assert num_put_off > 0
        assert found_losses == losses
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
