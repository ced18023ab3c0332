"""Messages share the memory of what they hold, until somebody writes to it."""

import pytest
import torch
from torch import Tensor

from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.wire_format import pack


def address(tensor: Tensor) -> int:
    """Where it stands in memory; ``data_ptr`` counts as a write."""
    return torch._C._data_address(tensor)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_usual_tensor_is_not_copied(memory_format):
    tensor = torch.rand(2, 3, 4, 5).to(memory_format=memory_format)
    message = pack(tensor, TensorSpec.of(tensor))
    assert address(message) == address(tensor)
    assert message.nbytes == tensor.nbytes


def test_whoever_writes_gets_a_copy():
    tensor = torch.ones(4)
    before = address(tensor)
    message = pack(tensor, TensorSpec.of(tensor))
    tensor.add_(1)
    assert address(message) == before != address(tensor)
    assert message.tolist() == [1.0] * 4
    assert tensor.tolist() == [2.0] * 4


def test_when_the_message_has_gone_nothing_is_copied():
    tensor = torch.ones(4)
    before = address(tensor)
    message = pack(tensor, TensorSpec.of(tensor))
    del message
    tensor.add_(1)
    assert address(tensor) == before


def test_a_message_keeps_no_larger_memory_alive():
    tensor = torch.rand(100, 4)[0]
    assert pack(tensor, TensorSpec.of(tensor)).untyped_storage().nbytes() == tensor.nbytes
