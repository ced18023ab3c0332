"""Checkpoints of Accelerate: those of one process, whatever layout writes or reads them."""

import os
import random

import numpy as np
import pytest
import torch
from accelerate.utils import ProjectConfiguration, load
from accelerate_checks import (
    MICROBATCHES,
    accelerated_loop,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    on_ranks,
    whole_state,
)
from safetensors.torch import load_file
from torch import nn

from smp_strategy.errors import CheckpointError

PP2 = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
TP2 = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}
LAYOUTS = {
    "pp2": (2, PP2),
    "pp4": (4, {**PP2, "pipeline_parallel_degree": 4}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2, "microbatches": 2}),
    "tp2": (2, {**TP2, "microbatches": MICROBATCHES, "tensor_parallel": {"blocks.*.0": "column"}}),
    "pp2 with replicas": (4, {**PP2, "microbatches": 2}),
    "one process": (1, {"pipeline_parallel_degree": 1, "microbatches": MICROBATCHES}),
}


class Tied(nn.Module):
    """Dropout, tied weights, a buffer, and a loss inside."""

    def __init__(self, dropout: float = 0.0, *, tie: bool = True) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(16)) for _ in range(4)
        )
        self.outlet = nn.Linear(16, 8)
        self.again = nn.Linear(8, 16, bias=False)
        if tie:
            self.again.weight = self.inlet.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, inputs, targets):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.outlet(hidden + self.again(inputs)) * self.scale
        return {"loss": nn.functional.cross_entropy(logits, targets)}


def tied(seed=0, **options):
    torch.manual_seed(seed)
    return Tied(**options)


def start(smp, *, seed=0, dropout=0.0, tie=True, **options):
    """A prepared run, with a scheduler."""
    accelerator = fresh_accelerator(smp, **options)
    model = tied(seed, dropout=dropout, tie=tie)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def go_on(run, data):
    accelerator, model, optimizer, scheduler = run
    if hasattr(accelerator, "smp"):
        accelerated_loop(accelerator, model, optimizer, data, scheduler=scheduler)
        return whole_state(accelerator)
    for batch in data:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def saves(smp, folder, options):
    """Train three steps, save, and go on; what there is at the end on rank 0."""
    run = start(smp, **options)
    go_on(run, batches()[:3])
    assert run[0].save_state(folder) == folder
    return go_on(run, batches()[3:])


def resumes(smp, folder, options, late):
    """Load, before or after the first step, and go on."""
    run = start(smp, seed=5, **options)
    if late:
        go_on(run, batches()[:2])
    run[0].load_state(folder)
    return go_on(run, batches()[3:])


def saves_and_resumes(*args):
    return saves(*args[:-1]), resumes(*args)


@pytest.mark.parametrize(
    ("layout", "late"), [("pp2", True), ("sdp2", False), ("tp2", True), ("pp2 with replicas", False)]
)
def test_a_run_goes_on_bit_for_bit(layout, late, tmp_path):
    world_size, smp = LAYOUTS[layout]
    expected, found = on_ranks(saves_and_resumes, world_size, smp, tmp_path / "state", {"dropout": 0.2}, late)[0]
    assert_same(found, expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two stages save after three steps, with dropout and without tied weights, and what they come to."""
    folder = tmp_path_factory.mktemp("saved") / "state"
    options = {"dropout": 0.2, "tie": False}
    return folder, options, on_ranks(saves, 2, PP2, folder, options)[0]


@pytest.mark.dear
@pytest.mark.parametrize(("reads", "late"), [("pp4", False), ("one process", True), ("sdp2", False), ("tp2", True)])
def test_a_run_goes_on_under_another_layout(reads, late, saved):
    folder, options, expected = saved
    world_size, smp = LAYOUTS[reads]
    found = on_ranks(resumes, world_size, smp, folder, options, late)[0]
    if reads == "sdp2":  # replicas move the scheduler once for each, and have dropout of their own
        expected = on_ranks(resumes, 4, LAYOUTS["pp2 with replicas"][1], folder, options, False)[0]
    # Bit for bit where sums are those of one process.
    assert_same(found, expected, **({} if reads in ("pp4", "one process") else {"rtol": 1e-5, "atol": 1e-6}))


def plain(folder, steps, reads):
    run = start(None, seed=5 if reads else 0)
    if reads:
        run[0].load_state(folder)
    found = go_on(run, batches()[slice(3, 6) if reads else slice(steps)])
    if not reads:
        run[0].save_state(folder)
    return found


def files(folder):
    return sorted(each.name for each in folder.iterdir())


def test_plain_accelerate_goes_on_with_our_files_and_we_with_its(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    on_ranks(saves, 2, PP2, ours, {})
    on_ranks(plain, 1, theirs, 3, False)
    assert files(ours) == sorted([*files(theirs), "manifest.json", "smp_strategy.bin"])
    weights, expected = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert list(weights) == list(expected)
    assert "again.weight" not in weights
    optimizer, expected = load(ours / "optimizer.bin"), load(theirs / "optimizer.bin")
    assert optimizer["param_groups"] == expected["param_groups"]
    assert list(optimizer["state"]) == list(expected["state"])
    assert load(ours / "scheduler.bin") == load(theirs / "scheduler.bin")
    assert load(ours / "random_states_0.pkl").keys() == load(theirs / "random_states_0.pkl").keys()

    whole = on_ranks(plain, 1, tmp_path / "whole", 6, False)[0]
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert_same(on_ranks(plain, 1, ours, 0, True)[0], whole, **close)
    assert_same(on_ranks(resumes, 2, PP2, theirs, {}, False)[0], whole, **close)


def makes_other_files(folder):
    """Before the first step; pickled weights; into a folder that has a checkpoint."""
    run = start(PP2)
    before = folder / "before"
    run[0].save_state(before)
    (before / "mine.txt").write_text("kept")
    go_on(run, batches()[:1])
    run[0].save_state(before, safe_serialization=False)
    again = start(PP2, seed=5)
    again[0].load_state(before)
    return files(before), go_on(again, batches()[1:2]), go_on(run, batches()[1:2])


def test_a_folder_is_written_again_and_has_nothing_that_is_out_of_date(tmp_path):
    found, resumed, expected = on_ranks(makes_other_files, 2, tmp_path)[0]
    assert "pytorch_model.bin" in found
    assert "model.safetensors" not in found  # which would be loaded in its place
    assert "mine.txt" in found
    assert_same(resumed, expected)
    assert files(tmp_path) == ["before"]


def without_values(folder):
    accelerator = fresh_accelerator({**PP2, "delayed_parameter_initialization": True})
    with torch.device("meta"):
        model = Tied(dropout=0.2, tie=False)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run = (accelerator, *accelerator.prepare(model, optimizer, scheduler))
    accelerator.load_state(folder)
    return go_on(run, batches()[3:])


def test_a_model_without_values_is_loaded(saved):
    folder, _, expected = saved
    assert_same(on_ranks(without_values, 2, folder)[0], expected)


def on_its_own_node(folder):
    """Each rank is alone on a machine whose files the other does not see."""
    os.environ["LOCAL_RANK"] = "0"
    node = folder / f"node{os.environ['RANK']}"
    node.mkdir()
    os.chdir(node)
    naming = ProjectConfiguration(
        save_on_each_node=True, project_dir=".", automatic_checkpoint_naming=True, total_limit=1
    )
    run = start(PP2, project_config=naming)
    go_on(run, batches()[:1])
    run[0].save_state()
    run[0].save_state()
    run[0].save_model(run[1], "export", max_shard_size="2KB")
    expected = go_on(run, batches()[1:2])
    run = start(PP2, project_config=naming, seed=5)
    run[0].load_state()
    found = sorted(str(each.relative_to(node)) for each in node.rglob("*") if each.is_file())
    return found, expected, go_on(run, batches()[1:2])


def test_each_node_has_all_files_if_the_user_wants_that(tmp_path):
    (names, expected, found), (others, _, _) = on_ranks(on_its_own_node, 2, tmp_path)
    assert names == others
    assert "checkpoints/checkpoint_1/optimizer.bin" in names
    assert "export/model.safetensors.index.json" in names
    assert not [name for name in names if "checkpoint_0" in name or "incomplete" in name]
    assert_same(found, expected)


class Counter:
    """Something of the user's; its state may be such that it cannot be written."""

    def __init__(self, count=0, extra=None):
        self.count, self.extra = count, extra

    def state_dict(self):
        return {"count": self.count, "extra": self.extra}

    def load_state_dict(self, state):
        self.count = state["count"]


def numbers_checkpoints(folder):
    naming = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    run = start(PP2, project_config=naming)
    accelerator = run[0]
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for count in range(3):
        counter.count = count
        accelerator.save_state()
    found = [files(folder / "checkpoints")]
    counter.extra = accelerator.is_main_process and (lambda: None)  # cannot be pickled
    try:
        accelerator.save_state()
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    found += [files(folder / "checkpoints"), files(folder)]
    naming.iteration = 0  # as if the run was started again
    accelerator.load_state()
    found.append((counter.count, naming.iteration))
    naming.iteration = 2
    for call in (accelerator.save_state, lambda: fresh_accelerator(PP2).save_state()):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_numbered_checkpoints_are_complete_and_not_too_many(tmp_path):
    for rank, found in enumerate(on_ranks(numbers_checkpoints, 2, tmp_path)):
        names, failed, afterwards, beside, count, exists, unnamed = found
        assert names == afterwards == ["checkpoint_1", "checkpoint_2"]
        assert "pickle" in failed
        assert rank == 0 or failed.startswith("PeerFailedError: Rank 0 failed while saving")
        assert rank == 1 or beside == ["checkpoints"]  # rank 0 removes what it has written, which is incomplete
        assert count == (2, 3)
        assert "checkpoint_2 (2) already exists" in exists
        assert "`save_state` needs `output_dir`" in unnamed


def misses_objects(folder):
    run = start(PP2)
    run[0].save_state(folder)
    run[0].register_for_checkpointing(Counter())
    found = []
    for call in (
        lambda: run[0].load_state(folder),
        lambda: run[0].load_state(folder / "nowhere"),
        lambda: run[0].load_state(),
        lambda: run[0].load_state(folder, strickt=False),
        lambda: run[0].save_state(folder / "model.safetensors"),
        lambda: run[0].save_state("s3://bucket/state"),
        lambda: run[0].load_state("s3://bucket/state"),
        lambda: run[0].save_model(run[1], "s3://bucket/model"),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    (folder / "model.safetensors").unlink(missing_ok=True)
    for error_class, content in ((FileNotFoundError, None), (CheckpointError, [1, 2])):
        run[0].wait_for_everyone()
        if content is not None and run[0].is_main_process:
            torch.save(content, folder / "pytorch_model.bin")
            (folder / "manifest.json").unlink()
        run[0].wait_for_everyone()
        try:
            run[0].load_state(folder)
        except error_class as error:
            found.append(str(error))
    return found


def test_what_cannot_be_loaded_is_said_on_all_ranks(tmp_path):
    for found in on_ranks(misses_objects, 2, tmp_path / "state"):
        assert "found 0 checkpoints, but 1 objects are registered" in found[0]
        assert "folder does not exist" in found[1]
        assert "automatic checkpoint naming is disabled" in found[2]
        assert "no options ['strickt']" in found[3]
        assert "is a file, but a folder is to be written" in found[4]
        assert all("is an address, and only Lightning's checkpoints" in each for each in found[5:8])
        assert "neither model.safetensors nor pytorch_model.bin" in found[8]
        assert "pytorch_model.bin has an object of the class list, so `accelerator.save_state` has not" in found[9]


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draws_after_loading(smp, folder, rank_draws):
    """What each rank draws after loading; when saving, some ranks have drawn for themselves before."""
    run = start(smp, gradient_accumulation_steps=4)
    accelerator = run[0]
    if rank_draws is None:
        accelerator.load_state(folder)
        return draws(), accelerator.step
    random.seed(accelerator.smp.data_rank)
    np.random.seed(accelerator.smp.data_rank)
    torch.manual_seed(accelerator.smp.data_rank)
    for _ in range(rank_draws[accelerator.smp.rank]):
        draws()
    accelerated_loop(accelerator, *run[1:3], batches()[:3])
    accelerator.save_state(folder)
    return draws(), accelerator.step


def test_random_generators_and_the_place_in_the_accumulation_window_go_on(tmp_path):
    smp = LAYOUTS["pp2 with replicas"][1]
    expected = on_ranks(draws_after_loading, 4, smp, tmp_path, [0, 0, 3, 0])
    assert [step for _, step in expected] == [3] * 4
    assert len({drawn for drawn, _ in expected}) == 3
    assert [name for name in files(tmp_path) if "random" in name] == ["random_states_0.pkl", "random_states_1.pkl"]
    assert on_ranks(draws_after_loading, 4, smp, tmp_path, None) == expected
    # One stage: a file for each rank.
    alone = {"pipeline_parallel_degree": 1, "microbatches": 2}
    firsts = [each for rank, each in enumerate(expected) if rank in (0, 1)]
    two = on_ranks(draws_after_loading, 2, alone, tmp_path, None)
    assert two[0] == firsts[0]
    four = on_ranks(draws_after_loading, 4, alone, tmp_path, None)
    assert four[:2] == two
    assert [step for _, step in four] == [3] * 4  # also where there is no file
