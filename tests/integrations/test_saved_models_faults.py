"""Model files of a partitioned model: memory, and what is left when something goes wrong."""

import errno
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from accelerate_checks import adamw, assert_same, fresh_accelerator, on_ranks
from saved_models import LAYOUTS, PP2, contents, gpt2, trained
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from smp_strategy.checkpoint.storage.weight_file import SafetensorsFile
from smp_strategy.distributed import deadlock as watch
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor

WIDTH = 128


class NewBytes(TorchDispatchMode):
    """Counts the bytes of all memory that was made since it was entered, and exists."""

    def __init__(self, state) -> None:
        super().__init__()
        self.most = 0
        blocks = [block.tensor for held in state.values() for block in held.blocks]
        self._before = {tensor.untyped_storage()._cdata for tensor in blocks}
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and not isinstance(tensor, DeferredTensor)
                and tensor.device.type != "meta"
            ):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._storages[storage._cdata] = weakref.ref(storage)
        living = {number: storage for number, each in self._storages.items() if (storage := each()) is not None}
        self._storages = {number: self._storages[number] for number in living}
        self.most = max(self.most, sum(storage.nbytes() for storage in living.values()))
        return result


def counts(name, smp, folder):
    accelerator, model = trained(name, smp, WIDTH)
    with NewBytes(accelerator.smp.engine.saved.held_state(())["state_dict"]) as counter:
        model.save_pretrained(folder / "one")
        model.save_pretrained(folder / "many", max_shard_size="200KB")
        accelerator.save_model(model, folder / "accelerate", max_shard_size="200KB")
    return counter.most, {name: value.nbytes for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(("name", "layout"), [*(("llama", layout) for layout in LAYOUTS), ("mixtral", "sdp2")])
def test_no_rank_has_more_than_a_tensor_besides_its_share(name, layout, tmp_path):
    world_size, smp = LAYOUTS[layout]
    for most, sizes in on_ranks(counts, world_size, name, smp, tmp_path):
        largest, total = max(sizes.values()), sum(sizes.values())
        # The tensor, a part of it that has just arrived, and three numbers that ranks exchange.
        print(f"{layout}: {most} new bytes at most, largest tensor {largest}, all {total}")
        assert most <= 2 * largest + 3 * 8
        assert total > 6 * largest or name == "mixtral"


def saves_alone(folder, others):
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 0.5, 0.2
    accelerator, model = trained("gpt2", PP2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    # Between this and the update nobody listens to the main process.
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    begin = time.monotonic()
    try:
        if accelerator.is_main_process:
            model.save_pretrained(folder)
        elif others == "step":
            optimizer.step()
    except RuntimeError as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, ""


@pytest.mark.parametrize("others", ["step", "end"])
def test_a_call_on_the_main_process_alone_is_refused_within_seconds_where_nobody_listens(others, tmp_path):
    (seconds, message), _ = on_ranks(saves_alone, 2, tmp_path / "model", others)
    assert seconds < 10
    assert "model.save_pretrained" in message
    assert not (tmp_path / "model").exists()


def saves_when_whole(folder):
    accelerator, model = trained("gpt2", PP2)
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    if accelerator.is_main_process:
        model.save_pretrained(folder)
    return weights


def test_a_model_that_is_whole_again_is_saved_by_the_main_process_alone(tmp_path):
    weights = on_ranks(saves_when_whole, 2, tmp_path)[0]
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), weights)


def saves_twice(folder, fails):
    """The second time, something happens to the last rank when it has written some tensors."""
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 0.5, 0.2
    accelerator, model = trained("llama", PP2)
    model.save_pretrained(folder, max_shard_size="5KB")
    before = contents(folder)
    with torch.no_grad():
        accelerator.smp.with_weights(lambda: [each.add_(1.0) for each in model.parameters()])
    write, left = SafetensorsFile.write, [3]

    def broken(self, name, value):
        left[0] -= 1
        if left[0] < 0 and not accelerator.is_main_process:
            if fails == "killed":
                os._exit(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, value)

    SafetensorsFile.write = broken
    begin = time.monotonic()
    try:
        model.save_pretrained(folder, max_shard_size="5KB")
    except Exception as error:
        seconds = time.monotonic() - begin
        return seconds, f"{type(error).__name__}: {error}", before, contents(folder)
    return 0.0, "nothing", before, contents(folder)


def test_an_error_on_one_rank_is_told_to_all_and_the_old_files_stay(tmp_path):
    for rank, (seconds, message, before, after) in enumerate(on_ranks(saves_twice, 2, tmp_path / "model", "full")):
        assert seconds < 10
        assert ("the disk is full" if rank else "Rank 1 failed while writing") in message
        assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def saves_where_it_cannot(folder):
    accelerator, model = trained("gpt2", PP2)
    (folder / "file").touch()
    found = []
    for call in (
        lambda: model.save_pretrained(folder / "file"),
        lambda: model.save_pretrained(folder / "new", max_shard_size="much"),
        lambda: accelerator.save_model(model, folder / "new", max_shard_size="much"),
    ):
        try:
            call()
        except Exception as error:
            found.append(str(error))
    accelerator.wait_for_everyone()
    return found, [path.name for path in folder.iterdir()]


def test_what_the_first_rank_cannot_prepare_is_an_error_of_all(tmp_path):
    for found, files in on_ranks(saves_where_it_cannot, 2, tmp_path):
        assert "is a file, but a folder is to be written" in found[0]
        assert len(found) == 3
        assert files == ["file"]


def saves_before_the_first_step(folder):
    accelerator = fresh_accelerator({**PP2, "delayed_parameter_initialization": True})
    with torch.device("meta"):
        model = gpt2()
    model, _ = accelerator.prepare(model, adamw(model))
    with pytest.raises(UnsupportedError, match="to be saved before its first step"):
        model.save_pretrained(folder)
    return folder.exists()


def test_a_model_without_values_is_not_saved(tmp_path):
    assert on_ranks(saves_before_the_first_step, 2, tmp_path / "model") == [False, False]


def saves_without_a_shared_folder(folder):
    accelerator, model = trained("llama", PP2)
    is_dir = Path.is_dir
    if not accelerator.is_main_process:
        Path.is_dir = lambda self: "model" not in self.parts and is_dir(self)
    model.save_pretrained(folder, max_shard_size="5KB")
    Path.is_dir = is_dir
    return accelerator.get_state_dict(model)


def test_ranks_that_do_not_see_the_folder_send_what_they_have(tmp_path):
    weights = on_ranks(saves_without_a_shared_folder, 2, tmp_path / "model")[0]
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), weights)


def test_a_process_that_is_killed_leaves_the_old_files(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(Exception, match="rank 1|ended|exit"):
        on_ranks(saves_twice, 2, folder, "killed")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert not [name for name in contents(folder) if "incomplete" in name]


class Stopped(BaseException):
    pass


def test_half_of_the_new_files_never_look_complete(tmp_path, monkeypatch):
    """Files are moved one by one to a folder that has others."""
    from smp_strategy.checkpoint.storage import atomic_commit
    from smp_strategy.engine.saving.saved_models import state_folders as folders

    target, names = tmp_path / "model", [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index, replace = "model.safetensors.index.json", os.replace
    for stop in range(5):
        for each in (*names, index, "mine.txt"):
            target.mkdir(exist_ok=True)
            (target / each).write_text("old")
        staging = folders.begin(target)
        for each in (*names, index):
            (staging / each).write_text("new")
        moved = []

        def stopping(source, place, moved=moved, stop=stop):
            if len(moved) == stop:
                raise Stopped
            moved.append(Path(source).name)
            replace(source, place)

        monkeypatch.setattr(atomic_commit.os, "replace", stopping)
        try:
            folders.move_in(staging, target, replaces=folders.WEIGHTS)
        except Stopped:
            assert stop < 4
            assert not (target / index).exists()
        monkeypatch.setattr(atomic_commit.os, "replace", replace)
        assert (target / "mine.txt").read_text() == "old"
    assert {(target / each).read_text() for each in (*names, index)} == {"new"}
