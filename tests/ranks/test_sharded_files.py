"""Directories that ranks write together, and read under other layouts."""

import errno
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from smp_strategy.checkpoint.storage import writer as writers
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.verify import problems_of
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import CheckpointError
from smp_strategy.testing import run_ranks

SHAPES = {"a": (12, 8), "b": (24,), "c": (5, 3, 4), "d": (), "e": (0, 4), "f": (1000, 70)}
DTYPES = {"b": torch.bfloat16, "d": torch.int64}


def whole(name, step=0):
    seed = 100 * step + ord(name)
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * 100
    return values.to(DTYPES.get(name, torch.float32))


def held(name, blocks):
    return HeldTensor(shape=SHAPES[name], dtype=DTYPES.get(name, torch.float32), blocks=tuple(blocks))


def rows(tensor, rank, size):
    """A share of the rows; all of what has none."""
    if not tensor.ndim:
        return HeldRectangle((), tensor)
    bounds = [len(tensor) * number // size for number in (rank, rank + 1)]
    return HeldRectangle((bounds[0], *[0] * (tensor.ndim - 1)), tensor[bounds[0] : bounds[1]])


def columns(tensor, rank, size):
    if tensor.ndim < 2:
        return HeldRectangle((0,) * tensor.ndim, tensor)
    bounds = [tensor.shape[1] * number // size for number in (rank, rank + 1)]
    return HeldRectangle((0, bounds[0], *[0] * (tensor.ndim - 2)), tensor[:, bounds[0] : bounds[1]])


def layouts(tensors, rank, size):
    """What a rank has under some layouts."""
    replicas = {name: held(name, [HeldRectangle((0,) * each.ndim, each)]) for name, each in tensors.items()}
    stages = {name: replicas[name] for number, name in enumerate(sorted(tensors)) if number % size == rank}
    return {
        "replicas": replicas,
        "stages": stages,
        "sharded": {name: held(name, [rows(each, rank, size)]) for name, each in tensors.items()},
        "columns": {name: held(name, [columns(each, rank, size)]) for name, each in tensors.items()},
        "overlap": {
            name: held(name, [HeldRectangle((0,) * each.ndim, each)] if rank == 0 else [columns(each, rank, size)])
            for name, each in tensors.items()
        },
    }


def save_all(folder):
    writer = None
    for step, layout in enumerate(("replicas", "stages", "sharded", "columns", "overlap")):
        tensors = {name: whole(name, step) for name in SHAPES}
        state = {"state_dict": layouts(tensors, dist.get_rank(), dist.get_world_size())[layout], "step": step}
        writer = writer or ShardedWriter(lambda: dist.new_group(backend="gloo"))
        prepared = writer.prepare(state)
        for tensor in tensors.values():
            tensor.zero_()
        prepared.write(folder / layout, note={"layout": layout}, rest={"epoch": step})


def load_all(folder):
    for step, written in enumerate(("replicas", "stages", "sharded", "columns", "overlap")):
        stored = CheckpointReader.open(folder / written)
        assert (stored.note, stored.rest()) == ({"layout": written}, {"epoch": step})
        assert stored.read_objects(["step"]) == {"step": step}
        for layout in ("replicas", "stages", "sharded", "columns"):
            tensors = {name: torch.full(SHAPES[name], -1, dtype=DTYPES.get(name, torch.float32)) for name in SHAPES}
            wanted = layouts(tensors, dist.get_rank(), dist.get_world_size())[layout]
            stored.fill({f"state_dict.{name}": each for name, each in wanted.items()})
            expected = {name: whole(name, step) for name in SHAPES}
            wanted_values = layouts(expected, dist.get_rank(), dist.get_world_size())[layout]
            for name, each in wanted.items():
                for block, right in zip(each.blocks, wanted_values[name].blocks, strict=True):
                    assert torch.equal(block.tensor, right.tensor), (written, layout, name)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1), (1, 2)])
def test_what_ranks_have_written_is_read_by_any_number_of_ranks(tmp_path, before, after):
    run_ranks(save_all, before, tmp_path)
    for path in tmp_path.iterdir():
        assert problems_of(path) == []
        values = sum(each.nbytes for each in map(whole, SHAPES))
        assert sum(file.stat().st_size for file in path.glob("*.distcp")) < values + 60_000  # each element once
    run_ranks(load_all, after, tmp_path)


def replicas_share(folder):
    tensors = {name: whole(name) for name in ("a", "b", "c")}
    ShardedWriter(lambda: dist.new_group(backend="gloo")).prepare(tensors).write(folder / "x")


def test_replicas_share_the_work(tmp_path):
    run_ranks(replicas_share, 3, tmp_path)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "x").glob("*.distcp"))]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * sum(sizes) / 3 + 2000


def others_read(folder):
    tensors = {name: whole(name) for name in SHAPES}
    rank, size = dist.get_rank(), dist.get_world_size()
    writer = ShardedWriter(lambda: dist.new_group(backend="gloo"))
    writer.prepare({"state_dict": layouts(tensors, rank, size)["sharded"], "n": [1, {"x": rank}]}).write(folder / "x")
    mesh = init_device_mesh("cpu", (size,))
    state = {
        "state_dict": {
            "a": DTensor.from_local(torch.zeros(12, 8 // size), mesh, [torch.distributed.tensor.Shard(1)]),
            "f": torch.zeros(SHAPES["f"]),
            "d": torch.tensor(0),
        },
        "n": [1, {"x": 5}],
    }
    dcp.load(state, checkpoint_id=folder / "x")
    assert torch.equal(state["state_dict"]["a"].full_tensor(), tensors["a"])
    assert torch.equal(state["state_dict"]["f"], tensors["f"])
    assert torch.equal(state["state_dict"]["d"], tensors["d"])
    assert state["n"][1] == {"x": 0}


def test_torch_reads_what_ranks_have_written(tmp_path):
    run_ranks(others_read, 2, tmp_path)


def fsdp_saves(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    after = {name: parameter.full_tensor().detach() for name, parameter in model.state_dict().items()}
    kept = {
        f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    assert not torch.equal(next(iter(after.values())), before[0])
    dcp.save({"state_dict": weights, "optimizer_0": state}, checkpoint_id=folder / "x")
    stored = CheckpointReader.open(folder / "x")
    for name, value in after.items():
        assert torch.equal(stored.read(f"state_dict.{name}"), value)
    for name, value in kept.items():
        assert torch.equal(stored.read(f"optimizer_0.state.{name}"), value)
    (group,) = stored.read_objects(["optimizer_0.param_groups"])["optimizer_0.param_groups"]
    assert (group["lr"], group["params"]) == (0.1, list(after))


def test_what_fsdp_has_written_is_read(tmp_path):
    run_ranks(fsdp_saves, 3, tmp_path)


def full_disk(folder):
    rank, found = dist.get_rank(), []
    writer = ShardedWriter(lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=20)))
    state = {"w": held("a", [rows(whole("a"), rank, dist.get_world_size())])}
    writer.prepare(state).write(folder / "x", note={"step": 1})
    for who, where in ((1, "write_item"), (2, "_created"), (0, "to_disk"), (0, "Manifest")):
        right = getattr(writers, where)

        def fails(*arguments, **named):
            raise OSError(errno.ENOSPC, "No space left on device")

        if rank == who:
            setattr(writers, where, fails)
        try:
            writer.prepare(state).write(folder / "x", note={"step": 2})
        except CheckpointError as error:
            found.append(str(error))
        setattr(writers, where, right)
        dist.barrier()
        assert CheckpointReader.open(folder / "x").note == {"step": 1}
        assert [path.name for path in folder.iterdir()] == ["x"]
    writer.prepare(state).write(folder / "x", note={"step": 3})
    assert CheckpointReader.open(folder / "x").note == {"step": 3}
    return found


def test_a_rank_that_fails_is_named_on_all_of_them_and_the_old_directory_stays(tmp_path):
    for found in run_ranks(full_disk, 3, tmp_path):
        ranks = [1, 2, 0, 0]
        assert [error.replace(str(tmp_path), "") for error in found] == [
            f"/x was not saved; checkpoints that were there before are untouched. Rank {rank}: the disk is full (No "
            "space left on device). Make room, or save elsewhere."
            for rank in ranks
        ]


def holes(folder):
    rank = dist.get_rank()
    writer = ShardedWriter(lambda: dist.new_group(backend="gloo"))
    right = {"w": held("a", [rows(whole("a"), rank, 2)])}
    writer.prepare(right)
    found = []
    for wrong in (
        {"w": held("a", [rows(whole("a"), 0, 2)])},
        {"w": held("a", [rows(whole("a"), rank, 2)]), **({"x": {"y": 1}, "x.y": 2} if rank == 0 else {})},
    ):
        for _ in range(2):
            try:
                writer.prepare(wrong)
            except CheckpointError as error:
                found.append(str(error))
    writer.prepare({**right, **({"more": torch.ones(3)} if rank else {})}).write(folder / "x")
    return found


def test_what_cannot_be_saved_is_an_error_on_all_ranks(tmp_path):
    for found in run_ranks(holes, 2, tmp_path):
        assert len(found) == 4
        assert all("of its 96 elements, the ranks have 48" in each for each in found[:2])
        assert all("Rank 0: The state cannot be saved: duplicated flatten key x.y" in each for each in found[2:])
    assert torch.equal(CheckpointReader.open(tmp_path / "x").read("more"), torch.ones(3))


def in_threads(folder):
    """Ranks go on, with collectives of their own, while threads write what was there before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weights, threads = whole("f"), []
    writer = ShardedWriter(lambda: dist.new_group(backend="gloo"))
    for step in range(3):
        expected = weights.clone()
        prepared = writer.prepare({"w": held("f", [rows(weights, rank, size)])})
        threads = [threading.Thread(target=prepared.write, args=(folder / str(step),))]
        threads[0].start()
        for _ in range(50):
            weights += 1
            dist.all_reduce(weights)
            weights /= size
        threads[0].join()
        assert torch.equal(CheckpointReader.open(folder / str(step)).read("w"), expected)


def test_training_goes_on_while_a_thread_writes(tmp_path):
    run_ranks(in_threads, 3, tmp_path)


def exchanged(folder):
    rank, size, asked = dist.get_rank(), dist.get_world_size(), []
    writer = ShardedWriter(lambda: dist.new_group(backend="gloo"))
    gather = collectives.gather_objects

    def counted(*arguments):
        asked.append(1)
        return gather(*arguments)

    collectives.gather_objects = counted
    for step in range(5):
        # The values of the third save are others, and the fourth has another layout on one rank.
        mine = rows(whole("a", step), rank, size) if step < 3 or rank else HeldRectangle((0, 0), whole("a", step))
        writer.prepare({"w": held("a", [mine]), "step": step}).write(Path(folder, str(step)))
    collectives.gather_objects = gather
    for step in range(5):
        stored = CheckpointReader.open(folder / str(step))
        assert torch.equal(stored.read("w"), whole("a", step))
        assert stored.read_objects(["step"]) == {"step": step}
    return len(asked)


def test_ranks_tell_each_other_what_they_have_only_when_it_changes(tmp_path):
    assert run_ranks(exchanged, 3, tmp_path) == [2, 2, 2]
