"""One file of ``torch.save`` from shards: what ``torch.load`` finds in it, memory, and errors of the writer."""

import zipfile

import pytest
import torch
import torch.distributed as dist

from smp_strategy.checkpoint.spread_state import SpreadState
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.checkpoint.torch_file import UnfilledState, write_torch_file
from smp_strategy.errors import CheckpointError, PeerFailedError
from smp_strategy.testing import run_ranks

DOING = "saving in a test"


def whole():
    generator = torch.Generator().manual_seed(3)
    return {
        "0.exp_avg": torch.randn(8, 3, generator=generator),
        "0.step": torch.tensor(5.0),
        "1.exp_avg": torch.randn(4, 2, generator=generator).bfloat16(),
        "1.codes": torch.arange(8, dtype=torch.uint8),
        "1.none": torch.empty(0, 3),
        "1.flag": torch.tensor([True, False]),
        "1.name": "sgd",
    }


def shares(num_ranks):
    """Rows of the first tensor on all ranks, the other entries on the last rank."""
    state, rank = whole(), dist.get_rank()
    first = state.pop("0.exp_avg")
    rows = first.shape[0] // num_ranks
    block = HeldRectangle((rank * rows, 0), first[rank * rows : (rank + 1) * rows])
    mine = {"0.exp_avg": HeldTensor(shape=tuple(first.shape), dtype=first.dtype, blocks=(block,))}
    if rank == num_ranks - 1:
        mine.update({name: HeldTensor.whole(each) if torch.is_tensor(each) else each for name, each in state.items()})
    return SpreadState(mine, ())


def nested(entries):
    rate = torch.tensor([0.5, 0.25])
    return {
        "state": {0: {name: each for name, each in entries.items() if name.startswith("0")}, 1: [*entries.values()]},
        # Values of its own, in one memory.
        "groups": [{"lr": rate, "last": rate[1], "params": [0, 1]}],
    }


def write(spread, make, path):
    state = UnfilledState(spread)
    write_torch_file([state], lambda: make(state.entries()), lambda: path.open("w+b"), doing=DOING)


def written(num_ranks, path):
    write(shares(num_ranks), nested, path)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("mmap", [False, True])
def test_the_file_is_that_of_torch_save(tmp_path, num_ranks, mmap):
    run_ranks(written, num_ranks, num_ranks, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)
    torch.save(nested(whole()), tmp_path / "plain.pt")
    expected = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert list(found["state"][0]) == ["0.exp_avg", "0.step"]
    assert found["state"][1].pop() == expected["state"][1].pop() == "sgd"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    rate = found["groups"][0]
    assert rate["last"].data_ptr() == rate["lr"][1:].data_ptr()
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert archive.testzip() is None


def peak_growth(path):
    large = 16 * (1 << 20)
    mine = {} if dist.get_rank() == 0 else {str(n): HeldTensor.whole(torch.full((large,), n / 4)) for n in range(8)}
    state = SpreadState(mine, ())
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` makes
    before = peak_bytes()
    write(state, dict, path)
    return peak_bytes() - before


def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def test_the_writer_needs_memory_for_one_tensor(tmp_path):
    first, _ = run_ranks(peak_growth, 2, tmp_path / "state.pt")
    one = 64 << 20
    assert first < 1.5 * one < 8 * one
    found = torch.load(tmp_path / "state.pt", mmap=True)
    assert [found[str(n)][-1].item() for n in range(8)] == [n / 4 for n in range(8)]


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def error_of_writing(path, make):
    try:
        write(shares(2), make, path)
    except (CheckpointError, PeerFailedError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def hidden(entries):
    return {"state": Holder(torch.ones(2)), **entries}


def test_tensors_in_other_objects_are_saved(tmp_path):
    assert run_ranks(error_of_writing, 2, tmp_path / "state.pt", hidden) == [None, None]
    found = torch.load(tmp_path / "state.pt", weights_only=False)
    assert found.pop("state").tensor.tolist() == [1, 1]
    assert found.pop("1.name") == "sgd"
    torch.testing.assert_close(found, {name: each for name, each in whole().items() if name != "1.name"})


def copied(entries):
    return {name: each.clone() if torch.is_tensor(each) else each for name, each in entries.items()}


def test_values_that_nobody_would_write_are_refused(tmp_path):
    first, second = run_ranks(error_of_writing, 2, tmp_path / "state.pt", copied)
    why = "CheckpointError: `0.exp_avg` would have no values"
    assert first.startswith(why)
    assert f"Rank 0 failed while saving in a test: {why}" in second


def test_all_ranks_are_told_if_the_file_cannot_be_written(tmp_path):
    first, second = run_ranks(error_of_writing, 2, tmp_path / "nowhere" / "state.pt", nested)
    assert "nowhere" in first
    assert second.startswith("PeerFailedError: Rank 0 failed while saving in a test")
