import collections
import os
import pickle
import random
import re
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from smp_strategy.checkpoint.storage.full_file import read_full, write_full
from smp_strategy.checkpoint.storage.torch_load import load_file
from smp_strategy.checkpoint.storage.verify import has_digests, problems_of
from smp_strategy.checkpoint.torch_file import without_checksums
from smp_strategy.errors import CheckpointError, DamagedError

FLIPS = 600  # and 400 more of a directory, in test_stored.py


def content(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.float().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    tied = torch.randn(5)
    return {
        "state_dict": {**model.state_dict(), "empty": torch.zeros(0), "tied": tied, "tied_too": tied},
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"rate": 0.1, "names": ["a", None]},
        "callbacks": collections.OrderedDict(best=torch.tensor(0.5)),
        "global_step": 3,
    }


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "x.ckpt"
    write_full(found, content())
    return found


@pytest.mark.parametrize("width", [8, 200])  # small values, and such as are digested on the way
def test_a_file_has_what_was_written_for_us_and_for_all_others(tmp_path, width):
    path = tmp_path / "new" / "x.ckpt"
    expected = content(width=width)
    write_full(path, expected)
    assert [each.name for each in path.parent.iterdir()] == ["x.ckpt"]
    assert problems_of(path) == []
    found = read_full(path)
    assert_same(found, expected)
    assert found["state_dict"]["tied"].data_ptr() == found["state_dict"]["tied_too"].data_ptr()
    for mmap in (False, True):
        assert_same(torch.load(path, mmap=mmap, weights_only=True), expected)
    with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
        assert_same(torch.load(path, mmap=True, weights_only=True), expected)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_what_was_read_stays_when_the_file_is_replaced_or_deleted(path):
    found = read_full(path)
    write_full(path, content(seed=1))
    assert_same(found, content())
    found = read_full(path)
    found["state_dict"]["tied"].add_(1)  # memory of this process
    assert_same(read_full(path), content(seed=1))
    path.unlink()
    assert_same(found["optimizer_states"], content(seed=1)["optimizer_states"])


def flipped(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def places_of_tensors(path):
    """For each byte of a value the names of the tensors that have it."""
    places = {}

    def look(value, name):
        if isinstance(value, torch.Tensor):
            offset = value.untyped_storage()._checkpoint_offset
            for byte in range(offset, offset + value.untyped_storage().nbytes()):
                places.setdefault(byte, []).append(name)
        elif isinstance(value, dict):
            for key, each in value.items():
                look(each, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list):
            for number, each in enumerate(value):
                look(each, f"{name}.{number}")

    look(torch.load(path, map_location="meta", weights_only=True), "")
    return places


def test_each_flipped_bit_of_a_value_is_found_and_the_tensor_is_named(path):
    places = places_of_tensors(path)
    random.seed(0)
    for byte in random.choices(list(places), k=FLIPS // 2):
        bit = byte * 8 + random.randrange(8)
        flipped(path, bit)
        (problem,) = problems_of(path)
        with pytest.raises(CheckpointError, match=rf"x\.ckpt is damaged: tensor `{re.escape(places[byte][0])}` has"):
            read_full(path)
        flipped(path, bit)
        assert (problem.file, problem.tensor) == ("x.ckpt", places[byte][0])
        assert all(name in str(problem) for name in places[byte])
    assert problems_of(path) == []


def assert_found_or_harmless(path, bit):
    flipped(path, bit)
    problems = problems_of(path)
    if problems:
        with pytest.raises(CheckpointError, match=r"x\.ckpt (is damaged|cannot be loaded)"):
            read_full(path)
    else:
        assert_same(read_full(path), content())
    flipped(path, bit)


def test_a_flipped_bit_anywhere_is_found_or_no_reader_looks_at_it(path):
    random.seed(0)
    for bit in random.sample(range(path.stat().st_size * 8), FLIPS // 2):
        assert_found_or_harmless(path, bit)


def test_a_flipped_bit_of_the_table_of_contents_is_found_or_no_reader_looks_at_it(path):
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir
    for byte in range(begin, path.stat().st_size):
        assert_found_or_harmless(path, byte * 8 + byte % 8)


@pytest.mark.parametrize("kept", [0, 1, 10, 100, 0.3, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_an_error(path, kept):
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match=r"x\.ckpt is damaged|or is damaged"):
        read_full(path)
    assert problems_of(path)


def test_a_file_that_grew_or_was_cut_at_its_end_is_an_error(path):
    data = path.read_bytes()
    for changed in (data[:-1], data[:-40], data + b"x" * 2**17):
        path.write_bytes(changed)
        assert problems_of(path)
        with pytest.raises(CheckpointError, match="damaged"):
            read_full(path)


@pytest.mark.parametrize("new_zip", [True, False])
def test_files_of_other_programs_are_read(tmp_path, new_zip):
    path = tmp_path / "x.ckpt"
    torch.save(content(), path, _use_new_zipfile_serialization=new_zip)
    assert has_digests(path) is new_zip
    assert problems_of(path) == []
    assert_same(read_full(path), content())
    with pytest.raises(FileNotFoundError):
        read_full(tmp_path / "missing.ckpt")


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["BOMB"])),)


class Own:
    """Of the user's program."""


def hostile(path, kind):
    if kind == "full":
        write_full(path, {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": Bomb()})
    elif kind == "plain":
        torch.save({"a": Bomb()}, path)
    elif kind == "legacy":
        torch.save({"a": Bomb()}, path, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("../../evil", b"x")
            archive.writestr("x/data.pkl", pickle.dumps(Bomb()))
    elif kind == "script":
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), path)
    elif kind == "beyond":
        torch.save({"a": torch.ones(60000)}, path)
        path.write_bytes(path.read_bytes().replace(b"M\x60\xea", b"M\xff\xff"))
    elif kind == "text":
        path.write_text("model: 3\n")
    elif kind == "tar":
        path.write_bytes(b"x" * 257 + b"ustar" + b"\0" * 2000)


@pytest.mark.parametrize("kind", ["full", "plain", "legacy", "pickle", "zip", "beyond", "text", "tar", "script"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning")  # that, from torch 2.14 on
def test_hostile_and_wrong_files_are_errors_and_run_nothing(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    path = tmp_path / "x.ckpt"
    hostile(path, kind)
    with pytest.raises(CheckpointError, match=r"x\.ckpt (is damaged|cannot be loaded)") as raised:
        read_full(path)
    assert problems_of(path)
    assert not (tmp_path / "exploded").exists()
    if kind in ("full", "plain"):
        assert "weights_only=False" in str(raised.value)


def test_a_damaged_file_with_a_bomb_runs_nothing_while_names_are_looked_up(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    path = tmp_path / "x.ckpt"
    write_full(path, {"bomb": Bomb(), "w": torch.full((1000,), 7.0)})
    place = path.read_bytes().index(torch.full((100,), 7.0).numpy().tobytes())
    flipped(path, place * 8)
    assert [each.tensor for each in problems_of(path)] == ["w"]
    assert not (tmp_path / "exploded").exists()


def test_who_trusts_a_file_gets_what_it_makes(tmp_path):
    path = tmp_path / "x.ckpt"
    write_full(path, {"a": Own()})
    assert isinstance(read_full(path, weights_only=False)["a"], Own)
    with pytest.raises(CheckpointError, match="weights_only"):
        read_full(path)


def test_an_error_in_the_middle_leaves_the_old_file(path):
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        write_full(path, {"w": torch.ones(2), "f": lambda: 0})
    assert_same(read_full(path), content())
    assert [each.name for each in path.parent.iterdir()] == ["x.ckpt"]


def test_a_file_without_checksums_is_read_and_said_to_have_none(tmp_path):
    with without_checksums():
        write_full(tmp_path / "x.ckpt", content())
    assert not has_digests(tmp_path / "x.ckpt")
    assert problems_of(tmp_path / "x.ckpt") == []
    assert_same(read_full(tmp_path / "x.ckpt"), content())


@pytest.mark.parametrize("content", [b"hello world", b"", b"\x00" * 100, b"{}"])
def test_a_file_of_another_kind_is_told_so_in_words(content, tmp_path):
    (tmp_path / "other.ckpt").write_bytes(content)
    with pytest.raises(DamagedError, match="is damaged, or no checkpoint: no file of PyTorch begins as it does"):
        load_file(tmp_path / "other.ckpt", weights_only=True)
