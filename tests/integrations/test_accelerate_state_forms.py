"""save_state in both forms, at once and in the background; load_state reads either, and only what is undamaged."""

import resource
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from accelerate_checks import MICROBATCHES, adamw, assert_same, batches, fresh_accelerator, on_ranks
from test_accelerate_saving import LAYOUTS, PP2, Counter, files, go_on, start, tied

from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.writer import Prepared
from smp_strategy.checkpoint.tools.verify import VERDICTS, verdict
from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.errors import CheckpointError
from smp_strategy.integrations.accelerate import state_files

SHARDED = {"state_dict_type": "sharded"}
ASYNC = {"async_save": True}
FORMS = {"sharded": SHARDED, "full, later": ASYNC, "sharded, later": {**SHARDED, **ASYNC}}


def saves(smp, folder, steps=3):
    """Train, save, and go on, so that what is saved changes while it is written."""
    run = start(smp, dropout=0.2, tie=False)
    go_on(run, batches()[:steps])
    run[0].save_state(folder)
    found = go_on(run, batches()[steps:])
    run[0].end_training()
    return found


def resumes(smp, folder, late=False):
    run = start(smp, seed=5, dropout=0.2, tie=False)
    if late:
        go_on(run, batches()[:2])
    run[0].load_state(folder)
    found = go_on(run, batches()[3:])
    run[0].end_training()
    return found


@pytest.fixture(scope="module", params=list(FORMS))
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "state"
    return request.param, folder, on_ranks(saves, 2, {**PP2, **FORMS[request.param]}, folder)[0]


@pytest.mark.parametrize(("reads", "late"), [("pp2", True), ("pp4", False), ("one process", True), ("tp2", True)])
def test_a_run_goes_on_under_any_layout_whatever_the_form(reads, late, saved):
    _, folder, expected = saved
    world_size, smp = LAYOUTS[reads]
    found = on_ranks(resumes, world_size, smp, folder, late)[0]
    assert_same(found, expected, **({"rtol": 1e-5, "atol": 1e-6} if reads == "tp2" else {}))


def test_what_is_spread_is_in_one_folder_and_the_rest_as_accelerate_has_it(saved):
    form, folder, _ = saved
    plain = ["manifest.json", "random_states_0.pkl", "scheduler.bin", "smp_strategy.bin"]
    if "sharded" not in form:
        assert files(folder) == sorted([*plain, "model.safetensors", "optimizer.bin"])
        return
    assert files(folder) == sorted([*plain, folders.SHARDED])
    stored = CheckpointReader.open(folder / folders.SHARDED)
    assert stored.tensors["state_dict.blocks.3.0.weight"].shape == (16, 16)
    assert "optimizer_0.state.blocks.3.0.weight.exp_avg" in stored.tensors
    assert stored.note["layout"]["pp"] == 2
    assert files(folder.parent) == ["state"]


def ties(smp, folder):
    """One tensor under two names stays one, also where copies are written."""
    run = start({**smp, **ASYNC})
    go_on(run, batches()[:1])
    run[0].save_state(folder)
    expected = go_on(run, batches()[1:2])
    run[0].smp.settle()
    again = start(smp, seed=5)
    again[0].load_state(folder)
    return files(folder), expected, go_on(again, batches()[1:2])


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_tied_weights_stay_tied(form, tmp_path):
    names, expected, found = on_ranks(ties, 2, {**PP2, "state_dict_type": form}, tmp_path / "state")[0]
    assert ("model.safetensors" in names) == (form == "full")
    if form == "full":
        assert "again.weight" not in state_files.weights(tmp_path / "state", 0)
    assert_same(found, expected)


def before_the_first_step(folder):
    run = start({**PP2, **SHARDED, **ASYNC})
    run[0].save_state(folder)
    expected = go_on(run, batches()[:2])
    run[0].smp.settle()
    again = start({**PP2, **SHARDED}, seed=5)
    again[0].load_state(folder)
    return expected, go_on(again, batches()[:2])


def test_a_whole_model_is_saved_as_well(tmp_path):
    expected, found = on_ranks(before_the_first_step, 2, tmp_path / "state")[0]
    assert_same(found, expected)


def changes_form(folder):
    """One folder again and again, in one form and the other, with and without files of others."""
    found = []
    for number, form in enumerate(("full", "sharded", "full", "sharded")):
        run = start({**PP2, "state_dict_type": form}, seed=number)
        go_on(run, batches()[:1])
        run[0].wait_for_everyone()
        if number == 2 and run[0].is_main_process:
            (folder / "mine.txt").write_text("kept")
        run[0].save_state(folder)
        found.append(files(folder))
        again = start(PP2, seed=9)
        again[0].load_state(folder)
        assert_same(go_on(again, batches()[1:2]), go_on(run, batches()[1:2]))
    return found


@pytest.mark.dear
def test_a_folder_has_one_form_only(tmp_path):
    full, sharded, more, both = on_ranks(changes_form, 2, tmp_path / "state")[0]
    assert folders.SHARDED not in full
    assert "model.safetensors" not in sharded
    assert "optimizer.bin" not in sharded
    assert more == sorted([*full, "mine.txt"])
    assert both == sorted([*sharded, "mine.txt"])


def numbers_checkpoints(folder, form):
    """Slow writers: old checkpoints stay until the new ones are there."""
    naming = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=1)
    run = start({**PP2, **ASYNC, "state_dict_type": form}, project_config=naming)
    accelerator, checkpoints = run[0], folder / "checkpoints"
    go_on(run, batches()[:1])
    accelerator.save_state()
    accelerator.smp.settle()
    may_go_on = threading.Event()
    move_in = folders.move_in

    def slowly(*args, **options):
        may_go_on.wait(20)
        move_in(*args, **options)

    folders.move_in = slowly
    found = [files(checkpoints)]
    accelerator.save_state()
    go_on(run, batches()[1:2])  # training goes on
    found.append(files(checkpoints))
    may_go_on.set()
    accelerator.end_training()
    return [*found, files(checkpoints), files(folder)]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_an_old_checkpoint_is_deleted_when_the_new_one_is_there(form, tmp_path):
    before, meanwhile, *after = on_ranks(numbers_checkpoints, 2, tmp_path, form)[0]
    assert before == meanwhile == ["checkpoint_0"]
    assert after == [["checkpoint_1"], ["checkpoints"]]


def fails_later(folder, form):
    """The disk of one rank is full: said at the next call that all ranks make, and the checkpoint before stays."""
    run = start({**PP2, **ASYNC, "state_dict_type": form})
    accelerator = run[0]
    go_on(run, batches()[:1])
    accelerator.save_state(folder)
    accelerator.smp.settle()
    before = {each: (folder / each).read_bytes() for each in files(folder) if (folder / each).is_file()}

    def full_disk(*args, **options):
        raise OSError("the disk is full")

    kept = Prepared._write_share, state_files.write_weights
    Prepared._write_share = state_files.write_weights = full_disk
    accelerator.save_state(folder)
    accelerator.smp.background._background._work.thread.join()
    Prepared._write_share, state_files.write_weights = kept
    try:
        accelerator.save_state(folder)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    after = {each: (folder / each).read_bytes() for each in before}
    accelerator.save_state(folder)
    accelerator.end_training()
    return said, before == after, files(folder.parent)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_what_goes_wrong_in_the_background_is_said_on_all_ranks(form, tmp_path):
    for said, is_same, beside in on_ranks(fails_later, 2, tmp_path / "state", form):
        assert "the disk is full" in said
        assert is_same
        assert beside == ["state"]


def has_no_room(folder):
    """Rank 0 may not write large files, and PyTorch does not tell the reason of the system."""
    accelerator = start(PP2)[0]
    large = Counter()
    large.state_dict = lambda: {"count": torch.zeros(100_000)}
    accelerator.register_for_checkpointing(large)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        accelerator.save_state(folder)
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "nothing"


def test_all_ranks_tell_that_the_disk_of_one_is_full(tmp_path):
    target = tmp_path / "state"
    first, second = on_ranks(has_no_room, 2, target)
    assert first.startswith(f"{target} was not saved: ")
    assert second == f"Rank 0 failed while saving to {target}: CheckpointError: {first}"
    assert list(tmp_path.iterdir()) == []


class Hostile:
    """Would leave a file if somebody unpickled it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def loads(folder, damages, load_kwargs=None):
    """What is said of each damaged file."""
    run = start(PP2, seed=3)
    run[0].register_for_checkpointing(Counter())
    go_on(run, batches()[:1])
    found = []
    for number in range(damages):
        try:
            run[0].load_state(folder / str(number), load_kwargs=load_kwargs)
            found.append("nothing")
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def saves_with_counter(folder, form):
    run = start({**PP2, "state_dict_type": form})
    run[0].register_for_checkpointing(Counter(3))
    go_on(run, batches()[:1])
    run[0].save_state(folder)
    return files(folder)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_flipped_bit_in_any_file_is_found(form, tmp_path):
    names = on_ranks(saves_with_counter, 2, tmp_path / "state", form)[0]
    paths = [each for each in sorted((tmp_path / "state").rglob("*")) if each.is_file()]
    assert len(paths) >= len(names)
    for number, path in enumerate(paths):
        copy = shutil.copytree(tmp_path / "state", tmp_path / str(number)) / path.relative_to(tmp_path / "state")
        data = bytearray(copy.read_bytes())
        data[len(data) // 2] ^= 4
        copy.write_bytes(data)
        assert verdict(tmp_path / str(number))[0] == VERDICTS.index("damaged"), path
    assert verdict(tmp_path / "state") == (VERDICTS.index("intact"), [])
    for rank, found in enumerate(on_ranks(loads, 2, tmp_path, len(paths))):
        for path, said in zip(paths, found, strict=True):
            if form == "full" or folders.SHARDED not in path.parts:
                assert ("CheckpointError" if rank == 0 else "PeerFailedError: Rank 0 failed") in said, path
            assert path.name in said, path
            if rank == 0 and folders.SHARDED not in path.parts:
                assert f"The newest undamaged one is {tmp_path / 'state'} beside it" in said
            assert "damaged" in said or "changed" in said, said


@pytest.mark.filterwarnings("ignore")
def test_nothing_that_stands_in_a_file_is_run(tmp_path):
    names = on_ranks(saves_with_counter, 2, tmp_path / "state", "full")[0]
    names = [name for name in names if name.endswith((".bin", ".pkl")) and "random" not in name]
    for number, name in enumerate(names):
        copy = shutil.copytree(tmp_path / "state", tmp_path / str(number))
        (copy / "manifest.json").unlink()
        torch.save({"state": Hostile(tmp_path / "run")}, copy / name)
    for found in on_ranks(loads, 2, tmp_path, len(names)):
        for name, said in zip(names, found, strict=True):
            assert "CheckpointError" in said, name
            assert "without running code" in said
            assert "names `getattr`" in said
    assert not (tmp_path / "run").exists()


def insists(folder):
    """The user's object has something in its state that only its own code can make."""
    run = start(PP2)
    counter = Counter(3, extra={1: Path("a"), 2: Exotic()})
    run[0].register_for_checkpointing(counter)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run[0].save_state(folder)
    try:
        run[0].load_state(folder)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    counter.count = 0
    run[0].load_state(folder, load_kwargs={"weights_only": False})
    return [str(each.message) for each in warned], said, counter.count


class Exotic:
    pass


def test_objects_of_other_classes_are_loaded_if_the_user_says_so(tmp_path):
    (warned, said, count), *_ = on_ranks(insists, 2, tmp_path / "state")
    assert any("custom_checkpoint_0.pkl has objects of" in each and "Exotic" in each for each in warned)
    assert "without running code" in said
    assert count == 3


def is_refused(folder):
    found = []
    each_node = ProjectConfiguration(save_on_each_node=True, project_dir=str(folder))
    for options in ({"project_config": each_node}, {}):
        run = start({**PP2, **SHARDED}, **options)
        run[0].register_save_state_pre_hook(lambda models, weights, folder: None)
        try:
            run[0].save_state(folder)
        except RuntimeError as error:
            found.append(str(error))
    run[0].end_training()
    empty = fresh_accelerator(PP2)
    (folder / folders.SHARDED).mkdir(parents=True, exist_ok=True)
    try:
        empty.load_state(folder)
    except RuntimeError as error:
        found.append(str(error))
    run = start(PP2)
    try:
        run[0].load_state(folder)
    except CheckpointError as error:
        found.append(str(error))
    return found


def test_what_cannot_be_served_is_said(tmp_path):
    for found in on_ranks(is_refused, 2, tmp_path / "state"):
        each_node, hooks, unprepared, damaged = found
        assert "leave that out" in each_node.lower()
        assert "register_save_state_pre_hook" in hooks
        assert "none is prepared" in unprepared
        assert folders.SHARDED in damaged


def several(folder):
    """A model that is spread, one that is not, and an optimizer of each."""

    def run(seed):
        accelerator = fresh_accelerator({"microbatches": MICROBATCHES, **PP2, **SHARDED})
        other = torch.nn.Linear(2, 2).requires_grad_(False)
        torch.nn.init.constant_(other.weight, float(seed))
        model = tied(seed)
        optimizer = adamw(model)
        return (accelerator, other, *accelerator.prepare(other, model, optimizer)[1:])

    accelerator, other, model, optimizer = run(1)
    step = (accelerator, model, optimizer, torch.optim.lr_scheduler.LambdaLR(adamw(other), lambda step: 1.0))
    go_on(step, batches()[:2])
    accelerator.save_state(folder)
    expected = go_on(step, batches()[2:3])
    accelerator, other, model, optimizer = run(2)
    accelerator.load_state(folder)
    step = (accelerator, model, optimizer, torch.optim.lr_scheduler.LambdaLR(adamw(other), lambda step: 1.0))
    return files(folder), other.weight.unique().tolist(), expected, go_on(step, batches()[2:3])


def test_models_that_are_not_spread_have_files_of_their_own(tmp_path):
    names, weight, expected, found = on_ranks(several, 2, tmp_path / "state")[0]
    assert {"model.safetensors", folders.SHARDED} <= set(names)
    assert weight == [1.0]
    assert_same(found, expected)
