"""Operations of CUDA behind the paths between accelerators: their calls, and on a GPU the memory of two processes."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import smp_strategy.distributed.device_paths.device_ipc as device_ipc
import smp_strategy.distributed.device_paths.ordered_edge as ordered_edge
from smp_strategy.distributed.device_paths.ordered_edge import NcclEdge
from smp_strategy.distributed.device_paths.page_locking import page_lock, page_unlock
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.open_channels import open_channels
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.testing import run_ranks

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")


class Runtime:
    """Of CUDA, as far as it locks pages.

    Args:
        status: result of each call.
    """

    def __init__(self, status: int) -> None:
        self.status, self.locked = status, {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = (nbytes, flags)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return self.status


def test_memory_is_locked_as_a_whole_and_unlocked():
    memory, runtime = torch.zeros(3, 1 << 12), Runtime(0)
    with mock.patch.object(torch.cuda, "cudart", return_value=runtime):
        page_lock(memory, CPU)
        assert runtime.locked == {memory.data_ptr(): (3 << 14, 1)}
        page_unlock(memory, CPU)
    assert not runtime.locked


def test_a_refusal_of_the_driver_is_an_error():
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=Runtime(801)),
        pytest.raises(RuntimeError, match="locking shared memory in RAM failed: 801"),
    ):
        page_lock(torch.zeros(8), CPU)


class Queue:
    """Stream that notes what is called while it is the current one."""

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def __enter__(self) -> None:
        self.calls.append("enter")

    def __exit__(self, *error: object) -> None:
        self.calls.append("exit")

    def wait_event(self, event: str) -> None:
        self.calls.append(f"wait for {event}")

    def record_event(self) -> str:
        self.calls.append("record")
        return "event"

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class Group:
    """Process group of two ranks that notes its calls."""

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def rank(self) -> int:
        return 1

    def _note(self, name: str, tensors: list, peer: int, tag: int) -> SimpleNamespace:
        self.calls.append(f"{name} {tensors[0].nbytes} bytes, rank {peer}")
        return SimpleNamespace(wait=lambda: self.calls.append("stream waits"))

    def send(self, *arguments: object) -> SimpleNamespace:
        return self._note("send", *arguments)

    def recv(self, *arguments: object) -> SimpleNamespace:
        return self._note("recv", *arguments)

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def edge():
    calls = []
    computing = SimpleNamespace(record_event=lambda: "what is computed")
    with (
        mock.patch.object(ordered_edge.torch, "Stream", return_value=Queue(calls)),
        mock.patch.object(ordered_edge, "current_stream", return_value=computing),
        mock.patch.object(torch.Tensor, "record_stream", side_effect=lambda stream: calls.append("memory is kept")),
    ):
        yield NcclEdge(CPU, Group(calls)), calls


def test_a_send_follows_what_is_computed_on_a_stream_of_its_own(edge):
    edge, calls = edge
    edge.send(torch.zeros(8, dtype=torch.uint8))
    sent = ["send 8 bytes, rank 0", "stream waits"]
    assert calls == ["enter", "wait for what is computed", *sent, "exit", "memory is kept"]


def test_a_receive_waits_for_nothing_that_is_computed(edge):
    edge, calls = edge
    landed = edge.receive(8)
    assert calls == ["enter", "recv 8 bytes, rank 0", "stream waits", "record", "exit"]
    assert landed.copied == "event"
    assert landed.tensor.nbytes == 8


def test_a_broken_edge_is_not_waited_for(edge):
    edge, calls = edge
    edge.close(is_broken=True)
    assert calls == ["abort"]
    edge.close()
    assert calls[1:] == ["synchronize", "abort"]


def test_an_event_is_recorded_after_the_copy():
    calls = []
    ipc = device_ipc.CudaIpc(CPU)
    target = mock.Mock(copy_=lambda source: calls.append("copy"))
    ipc.write(torch.zeros(1), target, SimpleNamespace(record=lambda: calls.append("record")))
    assert calls == ["copy", "record"]
    event = SimpleNamespace(wait=lambda: calls.append("wait"))
    landed = ipc.read(torch.arange(6.0).reshape(2, 3), (1, 2), event)
    assert calls[2:] == ["wait"]
    assert landed.tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert landed.tensor.stride() == (1, 2)


# On a GPU that two processes share


def exchanged(way: str) -> str:
    """Messages in both directions whose values are computed late; the path that they took."""
    device, here = torch.device("cuda", 0), dist.get_rank()
    torch.cuda.set_device(device)
    transport = Transport([0, 1], dist.group.WORLD, None, open_channels([0, 1], dist.group.WORLD, way, device))
    expected = torch.arange(1 << 20, device=device)
    spec = TensorSpec.of(expected)
    for turn in range(4):
        late = expected - 200 + here + turn
        for _ in range(200):
            late += 1
        transport.send(late, spec, 1 - here, turn)
        late.zero_()
        assert torch.equal(transport.receive(spec, 1 - here, turn).wait(), expected + 1 - here + turn)
        transport.flush()
    path = transport.channels[1 - here].path_of(spec)
    transport.close()
    return path


@needs_gpu
@pytest.mark.parametrize(
    ("way", "path"), [("cuda_ipc", "CUDA IPC"), ("shared_memory", "shared page-locked memory"), ("gloo", "gloo")]
)
def test_ranks_on_one_gpu_exchange_messages(way, path):
    assert run_ranks(exchanged, 2, way) == [path, path]
