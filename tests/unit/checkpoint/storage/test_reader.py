"""Directories that are written and read by one process."""

import os
import pickle
import random
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from smp_strategy.checkpoint.storage import reader as scattering
from smp_strategy.checkpoint.storage import reader as stored
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor, WholeObject
from smp_strategy.checkpoint.storage.reader import CheckpointReader, is_sharded
from smp_strategy.checkpoint.storage.verify import problems_of
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.errors import CheckpointError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
]


def save(state, path, **more):
    ShardedWriter().prepare(state, copy=more.pop("copy", True)).write(path, **more)
    return CheckpointReader.open(path)


def values(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 4).to(dtype)


def same(one, other):
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_of_all_kinds_are_read_as_they_were_written(tmp_path, copy):
    state = {str(dtype): values((3, 5), dtype) for dtype in DTYPES}
    state |= {
        "number": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "none_inside": torch.empty(2, 0),
        "turned": values((4, 6)).t(),
        "last": values((2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
        "conjugated": values(4, torch.complex64).conj(),
        "negative": torch.complex(values(4), values(4)).conj().imag,
        "parameter": torch.nn.Parameter(values((2, 2))),
        "part": values((6, 6))[1:3, 2:],
    }
    found = save(state, tmp_path / "x", copy=copy)
    assert set(found.tensors) == set(state)
    for name, tensor in state.items():
        assert same(found.read(name), tensor.detach().resolve_conj().resolve_neg()), name
    assert not problems_of(tmp_path / "x")


def test_others_read_what_is_written(tmp_path):
    tied, state = values((3, 2)), {"a": {"b.c": values((4, 2), torch.bfloat16), "n": 3}}
    state["a"]["one"] = HeldTensor.whole(tied, aliases=("other", "third"))
    state["l"] = [{"lr": 0.1, "params": ["x", "y"]}, {"lr": torch.tensor(0.2), "params": []}]
    state["o"] = WholeObject({"x": {"y": torch.ones(2)}})
    found = save(state, tmp_path / "x", note={"step": 3}, rest={"epoch": 3, "t": torch.ones(3)})
    dcp_to_torch_save(tmp_path / "x", tmp_path / "full.pt")
    whole = torch.load(tmp_path / "full.pt", weights_only=True)
    assert same(whole["a"]["b.c"], state["a"]["b.c"])
    assert all(same(whole["a"][name], tied) for name in ("one", "other", "third"))
    assert whole["a"]["n"] == 3
    assert whole["l"] == state["l"] == found.read_objects(["l"])["l"]
    assert torch.equal(whole["o"]["x"]["y"], torch.ones(2))
    assert os.path.getsize(tmp_path / "x" / "__0_0.distcp") < 20_000
    assert set(found.tensors) == {"a.b.c", "a.one", "a.other", "a.third"}
    assert set(found.objects) == {"a.n", "l", "o"}
    assert found.paths["a.other"] == ("a", "other")
    assert found.paths["l"] == ("l",)
    assert found.place("a.other") == found.place("l") == found.place("o") == "__0_0.distcp"
    assert found.note == {"step": 3}
    assert torch.equal(found.rest().pop("t"), torch.ones(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_others_write_is_read(tmp_path):
    state = {"a": {"w": values((5, 4)), "h": values(3, torch.bfloat16), "n": 3}, "l": [{"lr": 0.1, "params": ["x"]}]}
    state |= {"turned": values((4, 6)).t(), "part": values(100)[5:10], "number": torch.tensor(2)}
    dcp.save(state, checkpoint_id=tmp_path / "x")
    found = CheckpointReader.open(tmp_path / "x")
    assert all(same(found.read(name), state["a"][name.removeprefix("a.")]) for name in ("a.w", "a.h"))
    assert all(same(found.read(name), state[name]) for name in ("turned", "part", "number"))
    assert found.read_objects(found.objects) == {"a.n": 3, "l": state["l"]}
    assert (found.note, found.rest()) == ({}, {})
    assert [str(problem) for problem in problems_of(tmp_path / "x")] == [
        "manifest.json: is missing, so nothing can be verified."
    ]
    part = torch.empty(2, 2)
    found.fill({"a.w": HeldTensor(shape=(5, 4), dtype=torch.float32, blocks=(HeldRectangle((1, 1), part),))})
    assert torch.equal(part, state["a"]["w"][1:3, 1:3])


@pytest.mark.parametrize("window", [1, 24, 10**6])
def test_any_rectangle_is_read_into_any_memory(tmp_path, monkeypatch, window):
    monkeypatch.setattr(scattering, "WINDOW", window)
    monkeypatch.setattr(stored, "WINDOW", window)
    whole, draw = values((4, 3, 5)), random.Random(0)
    cut = [(range(0, 3), range(0, 3)), (range(3, 4), range(0, 3))]
    blocks = tuple(
        HeldRectangle((rows[0], columns[0], 0), whole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
        for rows, columns in cut
    )
    found = save({"w": HeldTensor(shape=(4, 3, 5), dtype=whole.dtype, blocks=blocks)}, tmp_path / "x")
    for _ in range(60):
        offsets = [draw.randrange(length) for length in whole.shape]
        sizes = [draw.randint(1, length - offset) for offset, length in zip(offsets, whole.shape, strict=True)]
        expected = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        memory = [torch.empty(sizes), torch.empty(sizes[::-1]).permute(2, 1, 0), torch.empty(sizes).double()]
        for target in memory:
            target.requires_grad_()
            found.fill(
                {"w": HeldTensor(shape=(4, 3, 5), dtype=target.dtype, blocks=(HeldRectangle(tuple(offsets), target),))}
            )
            assert torch.equal(target.detach().to(whole.dtype), expected)


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    found = save({"w": values((4096, 512)), "v": values(10)}, tmp_path / "x")
    count, read = [], os.preadv

    def counted(number, buffers, offset):
        count.append(read(number, buffers, offset))
        return count[-1]

    monkeypatch.setattr(os, "preadv", counted)
    part = torch.empty(100, 512)
    found.fill({"w": HeldTensor(shape=(4096, 512), dtype=torch.float32, blocks=(HeldRectangle((1100, 0), part),))})
    assert sum(count) < 1.1 * 2**20  # a piece, and what stands around 8 MiB
    count.clear()
    rows = tuple(HeldRectangle((row, 0), torch.empty(1, 512)) for row in range(1100, 1200))
    found.fill({"w": HeldTensor(shape=(4096, 512), dtype=torch.float32, blocks=rows)})
    assert torch.equal(torch.cat([row.tensor for row in rows]), part)
    assert sum(count) < 1.3 * 2**20  # the piece once


@pytest.mark.parametrize(
    ("name", "held", "message"),
    [
        ("w", HeldTensor.whole(torch.ones(3)), r"`w` has shape \[4\] in .*x, but \[3\] here"),
        ("w", HeldTensor.whole(torch.ones(4, dtype=torch.int64)), "`w` is torch.float32 in .*, but torch.int64 here"),
        ("n", HeldTensor.whole(torch.ones(4)), "`n` is torch.int64 in .*, but torch.float32 here"),
        ("v", HeldTensor.whole(torch.ones(4)), "has no tensor `v`"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, name, held, message):
    found = save({"w": torch.ones(4), "n": torch.ones(4, dtype=torch.int64)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=message):
        found.fill({name: held})


def test_a_hole_is_named_before_anything_is_read(tmp_path):
    found = save({"w": torch.ones(4, 3)}, tmp_path / "x")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([10**9, 3])
    metadata.storage_meta = None
    shutil.copytree(tmp_path / "x", tmp_path / "y", ignore=shutil.ignore_patterns("manifest.json"))
    (tmp_path / "y" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"not complete: of `w`, 2999999988 of 3000000000 elements"):
        CheckpointReader.open(tmp_path / "y").read("w")
    assert torch.equal(found.read("w"), torch.ones(4, 3))


def test_objects_must_be_loadable_without_running_code(tmp_path):
    with pytest.raises(CheckpointError, match="`a.b` cannot be saved"):
        save({"a": {"b": random.Random(0)}}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert list(tmp_path.iterdir()) == []


STATE = {
    "state_dict": {"w": values((7, 5)), "e": torch.empty(0), "h": values(9, torch.float16)},
    "optimizer_0": {"state": {"w": {"exp_avg": values((7, 5), seed=1), "step": 4}}, "param_groups": [{"lr": 0.1}]},
}


def load_all(path):
    found = CheckpointReader.open(path)
    for name in found.tensors:
        found.read(name)
    found.read_objects(found.objects)
    return found.rest()


def test_every_flipped_bit_is_found_and_named(tmp_path):
    save(STATE, tmp_path / "x", rest={"epoch": 3}, note={"step": 9})
    draw = random.Random(0)
    files = sorted((tmp_path / "x").iterdir())
    assert [path.name for path in files] == [".metadata", "__0_0.distcp", "manifest.json", "meta.pt"]
    for number in range(400):
        path = draw.choices(files, [path.stat().st_size for path in files])[0]
        right = path.read_bytes()
        wrong = bytearray(right)
        wrong[draw.randrange(len(wrong))] ^= 1 << draw.randrange(8)
        path.write_bytes(wrong)
        assert [problem.file for problem in problems_of(tmp_path / "x")] == [path.name]
        if number % 4 == 0:
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
                load_all(tmp_path / "x")
        path.write_bytes(right)
    assert problems_of(tmp_path / "x") == []
    assert load_all(tmp_path / "x") == {"epoch": 3}


def test_damage_is_told_by_file_and_tensor(tmp_path):
    found = save(STATE, tmp_path / "x")
    path = tmp_path / "x" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    position = data.index(STATE["state_dict"]["h"].numpy().tobytes())
    data[position] ^= 1
    path.write_bytes(data)
    message = f"bytes {position} to {position + 18} have changed since they were written."
    assert problems_of(tmp_path / "x") == [("__0_0.distcp", "state_dict.h", message)]
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged: bytes .* of `state_dict\.h`, have changed"):
        found.read("state_dict.h")
    assert torch.equal(found.read("state_dict.w"), STATE["state_dict"]["w"])


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json", "meta.pt"])
def test_another_checkpoint_is_offered_for_a_damaged_one(tmp_path, file):
    for name in ("x", "older", "oldest", "newer_but_cut"):
        save(STATE, tmp_path / name, rest={"epoch": 3})
    for name, time in (("x", 9), ("newer_but_cut", 8), ("older", 7), ("oldest", 6)):
        for path in (tmp_path / name).iterdir():
            os.utime(path, (time, time))
    os.truncate(tmp_path / "newer_but_cut" / "__0_0.distcp", 100)
    path = tmp_path / "x" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=f"The newest other checkpoint beside it is {tmp_path}/older: `smp verify"
    ):
        load_all(tmp_path / "x")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json", "meta.pt"])
@pytest.mark.parametrize("change", ["gone", "cut", "longer", "folder"])
def test_files_that_are_missing_or_of_another_length_are_named(tmp_path, file, change):
    save(STATE, tmp_path / "x", rest={"epoch": 3})
    path = tmp_path / "x" / file
    data = path.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change != "gone":
        path.write_bytes(data[:-10] if change == "cut" else data + b"0")
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        load_all(tmp_path / "x")
    assert any(file in str(problem) for problem in problems_of(tmp_path / "x"))


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "meta.pt"])
@pytest.mark.parametrize("by_torch", [True, False])
def test_no_file_can_run_code(tmp_path, file, by_torch):
    save(STATE, tmp_path / "x", rest={"epoch": 3})
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    metadata.storage_meta = None
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "x" / "manifest.json").unlink()
    load_all(tmp_path / "x")
    path = tmp_path / "x" / file
    if by_torch:
        torch.save(Bomb(tmp_path / "made"), tmp_path / "bomb")
    else:
        (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb(tmp_path / "made")))
    bomb = (tmp_path / "bomb").read_bytes()
    size = path.stat().st_size
    path.write_bytes(bomb)
    if file == "__0_0.distcp":
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(bomb)
        path.write_bytes(bomb.ljust(size, b"\0"))
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        load_all(tmp_path / "x")
    assert not (tmp_path / "made").exists()


def test_a_zip_file_with_other_shapes_than_the_metadata_is_refused(tmp_path):
    save({"w": torch.ones(100), "v": torch.ones(100, 1)}, tmp_path / "x")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    metadata.storage_meta = None
    (w, first), (v, second) = metadata.storage_data.items()
    metadata.storage_data = {w: second, v: first}
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "x" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"part of shape \[100\], but there is a tensor of shape \[100, 1\]"):
        CheckpointReader.open(tmp_path / "x").read("w")


def test_what_is_no_such_directory_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    with zipfile.ZipFile(tmp_path / "file", "w"):
        pass
    for name in ("folder", "file", "nothing"):
        assert not is_sharded(tmp_path / name)
        with pytest.raises(CheckpointError, match="is no directory that ranks have written"):
            CheckpointReader.open(tmp_path / name)
