"""Tensors arrive as they were: elements, dtype and the order in which they stand in memory."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.pipeline.transport.wire_format import MARK
from smp_strategy.testing import run_ranks

TENSORS: dict[str, Tensor] = {
    "contiguous": torch.arange(24.0).reshape(2, 3, 4),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.arange(24).reshape(4, 6)[:, ::2],
    "expanded": torch.arange(3.0).expand(4, 3),
    "scalar": torch.tensor(True),
    "odd bytes": torch.arange(3, dtype=torch.uint8),
    "half": torch.rand(3, 5).to(torch.bfloat16).T,
    "complex": torch.rand(3, dtype=torch.complex64).conj(),
    "empty": torch.empty(0, 3),
    "no dim": torch.tensor(2.5),
    "part of a memory": torch.arange(24.0)[8:16],
    "memory of numpy": torch.from_numpy(np.arange(6)),
    # What is not recognized as having come arrives all the same.
    "like memory that waits": torch.frombuffer(bytearray(MARK * 3), dtype=torch.int64),
}


def sent_to_the_other_stage(name: str, is_predicted: bool) -> Tensor | None:
    tensor = TENSORS[name]
    # Otherwise the other stage expects another layout: predictions can be wrong about it.
    spec = TensorSpec.of(tensor if is_predicted else tensor.contiguous())
    transport = Transport([0, 1], dist.group.WORLD)
    if dist.get_rank() == 0:
        transport.send(tensor, spec, 1, 0)
        transport.flush()
        return None
    return transport.receive(spec, 0, 0).wait()


@pytest.mark.parametrize("is_predicted", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_own_layout(name, is_predicted):
    _, found = run_ranks(sent_to_the_other_stage, 2, name, is_predicted)
    expected = TENSORS[name]
    assert found.stride() == ((3, 1) if name == "expanded" else expected.stride())
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def sent_before_it_is_changed() -> list[Tensor] | None:
    transport = Transport([0, 1], dist.group.WORLD)
    whole = torch.arange(1 << 20, dtype=torch.float32)
    part = torch.arange(1 << 20, dtype=torch.float32)[1:]
    if dist.get_rank() == 0:
        for tag, tensor in enumerate((whole, part)):
            transport.send(tensor, TensorSpec.of(tensor), 1, tag)
            tensor.zero_()  # while nobody receives yet
        dist.barrier()
        transport.flush()
        return [whole, part]
    dist.barrier()
    return [transport.receive(TensorSpec.of(tensor), 0, tag).wait() for tag, tensor in enumerate((whole, part))]


def test_what_is_changed_behind_a_send_arrives_as_it_was():
    left, found = run_ranks(sent_before_it_is_changed, 2)
    assert not any(tensor.any() for tensor in left)
    assert torch.equal(found[0], torch.arange(1 << 20, dtype=torch.float32))
    assert torch.equal(found[1], torch.arange(1, 1 << 20, dtype=torch.float32))


def threads_that_waited(asked_early: bool) -> tuple[Tensor, int] | None:
    tensor = TENSORS["contiguous"]
    spec = TensorSpec.of(tensor)
    transport = Transport([0, 1], dist.group.WORLD)
    if dist.get_rank() == 0:
        dist.barrier()
        transport.send(tensor, spec, 1, 0)
        transport.flush()
        dist.barrier()
        return None
    receipt = transport.receive(spec, 0, 0)
    if asked_early:
        assert not receipt.arrived()
    dist.barrier()
    dist.barrier()  # which comes behind the message, on the same connection
    received = receipt.wait()
    return received, sum(thread.name == "relay" for thread in threading.enumerate())


@pytest.mark.parametrize("asked_early", [False, True])
def test_a_thread_waits_only_for_a_message_that_is_asked_for_before_it_is_there(asked_early):
    _, (received, num_threads) = run_ranks(threads_that_waited, 2, asked_early)
    assert torch.equal(received, TENSORS["contiguous"])
    assert num_threads == asked_early
