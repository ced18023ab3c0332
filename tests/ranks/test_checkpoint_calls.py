"""SageMaker's calls: what is written under one layout is loaded under any other, at any time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smp_strategy
from smp_strategy.distributed import rendezvous as meeting
from smp_strategy.engine import active_engines
from smp_strategy.errors import CheckpointError, ConfigError, SMPError
from smp_strategy.testing import run_ranks
from tests.ranks.test_held_state import LAYOUTS, Model, start, train

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def state(engine, optimizer):
    """Weights, and the state of the optimizer, as one process has them, on rank 0."""
    weights, kept = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    tensors = {name: value.clone() for name, value in weights.items()}
    for number, each in kept.get("state", {}).items():
        tensors |= {f"{number}.{key}": value.clone() for key, value in each.items()}
    groups = kept.get("param_groups", [])
    return tensors, groups


def saves(layout, folder):
    """Three steps, two checkpoints in each form, and two steps more."""
    model, optimizer, engine = start(layout)
    train(model, optimizer, engine, range(2))
    smp_strategy.save_checkpoint(folder, "step_2", model=model, optimizer=optimizer)
    train(model, optimizer, engine, range(2, 3))
    optimizer.param_groups[0]["lr"] = 0.005
    content = {"step": 3, "seen": torch.arange(3), "rank": dist.get_rank()}
    smp_strategy.save_checkpoint(folder, tag="step_3", user_content=content)
    smp_strategy.save_checkpoint(folder, "whole", partial=False, model=model, optimizer=optimizer, user_content=content)
    smp_strategy.save_checkpoint(folder, "step_3", model=model, optimizer=[optimizer], user_content=content)
    there = state(engine, optimizer)
    train(model, optimizer, engine, range(3, 5))
    return there, state(engine, optimizer)


def resumes(layout, folder, late, options):
    model, optimizer, engine = start(layout, seed=1)
    if late:
        train(model, optimizer, engine, range(7, 9))
    content = smp_strategy.resume_from_checkpoint(folder, **options)
    there = state(engine, optimizer)
    train(model, optimizer, engine, range(3, 5))
    return content, there, state(engine, optimizer)


@pytest.fixture(scope="module", params=["pp2_sdp2", "tp2"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    return folder, *run_ranks(saves, LAYOUTS[request.param][0], request.param, folder)[0]


@pytest.mark.dear
@pytest.mark.parametrize("reads", ["single", "pp4", "mics2x2", "zero1", "tp2"])
@pytest.mark.parametrize("late", [False, True])
def test_a_run_goes_on_under_any_layout(reads, late, saved):
    folder, there, after = saved
    content, found, end = run_ranks(resumes, LAYOUTS[reads][0], reads, folder, late, {})[0]
    assert content["step"] == 3
    assert content["rank"] == 0
    assert torch.equal(content["seen"], torch.arange(3))
    assert found[1] == there[1]
    assert found[0].keys() == there[0].keys()
    for name, value in there[0].items():
        assert torch.equal(found[0][name], value), name
    for name, value in after[0].items():
        torch.testing.assert_close(end[0][name], value, **TOLERANCE, msg=name)


def test_the_files_are_sagemakers(saved):
    folder, there, _ = saved
    names = ["newest", "step_2_partial", "step_3_partial", "user_content_whole", "whole"]
    assert sorted(each.name for each in folder.iterdir()) == names
    assert (folder / "newest").read_text() == "step_3"
    weights = torch.load(folder / "whole", weights_only=True)
    model = Model()
    model.load_state_dict(weights)
    for name, value in model.state_dict().items():
        assert torch.equal(value, there[0][name]), name


@pytest.mark.parametrize("late", [False, True])
def test_weights_alone_are_loaded_from_a_file(late, saved):
    folder, there, _ = saved
    options = {"tag": "whole", "partial": False}
    content, found, _ = run_ranks(resumes, 2, "sdp2", folder, late, options)[0]
    assert content["step"] == 3
    for name in Model().state_dict():
        assert torch.equal(found[0][name], there[0][name]), name
    assert found[1][0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("options", "lr", "has_state"),
    [
        ({"load_optimizer": False}, 0.01, True),
        ({"load_sharded_optimizer_state": False}, 0.005, False),
    ],
)
def test_optimizers_or_their_moments_are_left_out(options, lr, has_state, saved):
    folder, there, _ = saved
    _, found, _ = run_ranks(resumes, 2, "sdp2", folder, True, options)[0]
    names = Model().state_dict().keys()
    for name in names:
        assert torch.equal(found[0][name], there[0][name]), name
    assert found[1][0]["lr"] == lr
    assert (found[0].keys() > names) == has_state


def keeps_some(folder):
    _, optimizer, engine = start("pp2")
    for step in range(4):
        smp_strategy.save_checkpoint(folder, f"step_{step}", optimizer=optimizer, num_kept_partial_checkpoints=2)
    engine.close()
    return sorted(each.name for each in folder.iterdir())


def test_old_partial_checkpoints_are_deleted(tmp_path):
    assert run_ranks(keeps_some, 2, tmp_path)[0] == ["newest", "step_2_partial", "step_3_partial"]


def refuses(folder):
    """What is said of wrong calls, on every rank."""
    found = []

    def said(call, *args, **options):
        try:
            call(*args, **options)
        except SMPError as error:
            found.append(str(error))
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")

    said(smp_strategy.save_checkpoint, folder, "a")
    model, optimizer, engine = start("pp2")
    said(smp_strategy.save_checkpoint, folder, "a", model=model.blocks)
    said(smp_strategy.save_checkpoint, folder, "a", optimizer=torch.optim.SGD(Model().parameters()))
    said(smp_strategy.save_checkpoint, folder, "a", user_content={"a": [lambda: 0]})
    said(smp_strategy.save_checkpoint, folder, "../a")
    said(smp_strategy.save_checkpoint, folder, "a", num_kept_partial_checkpoints=0)
    said(smp_strategy.resume_from_checkpoint, folder)
    assert not folder.exists()
    smp_strategy.save_checkpoint(folder, "weights", model=model)
    said(smp_strategy.resume_from_checkpoint, folder)
    said(smp_strategy.resume_from_checkpoint, folder, translate_function=dict)
    said(smp_strategy.resume_from_checkpoint, folder, partial=False)
    other, _, _ = start("pp2")
    said(smp_strategy.resume_from_checkpoint, folder)
    said(smp_strategy.resume_from_checkpoint, folder, model=nn.Sequential(other))
    engine.close()
    smp_strategy.save_checkpoint(folder, "renamed", partial=False, model=nn.ModuleList([other])[0])
    told = {"partial": False, "translate_function": lambda state: {f"x.{name}": each for name, each in state.items()}}
    said(smp_strategy.resume_from_checkpoint, folder, **told)
    smp_strategy.resume_from_checkpoint(folder, strict=False, **told)
    return found


def test_wrong_calls_are_explained_on_every_rank(tmp_path):
    messages = [
        ("not clear which model is meant: 0",) * 2,
        ("ModuleList, is none that is spread",) * 2,
        ("SGD, is none of those that train the model",) * 2,
        ("`user_content['a'][0]` is of type builtins.function", "Rank 0 failed while saving 'a'"),
        ("The tag of a checkpoint cannot be '../a'",) * 2,
        ("must be at least 1",) * 2,
        ("it has no file `newest`",) * 2,
        ("no state of optimizer 0",) * 2,
        ("`translate_function` changes",) * 2,
        ("It was saved with `partial=True`",) * 2,
        ("not clear which model is meant: 2 of this process are spread over the ranks (Model, Model)",) * 2,
        ("Sequential, is none that is spread",) * 2,
        ("RuntimeError: The state dict does not fit the module",) * 2,
    ]
    for rank, found in enumerate(run_ranks(refuses, 2, tmp_path / "checkpoints")):
        assert len(found) == len(messages)
        for message, expected in zip(found, messages, strict=True):
            assert expected[rank] in message


def on_rank_0_only(folder):
    meeting.PATIENCE_SECONDS = meeting.PAUSE_SECONDS = 0.1
    kept = start("pp2")
    try:
        if dist.get_rank() == 0:
            smp_strategy.save_checkpoint(folder, "a", model=kept[0])
        else:
            meeting.meet("something else")
    except SMPError as error:
        return str(error)
    return "nothing"


def test_a_call_on_one_rank_only_is_explained(tmp_path):
    for message in run_ranks(on_rank_0_only, 2, tmp_path):
        assert "rank 0: `smp_strategy.save_checkpoint`" in message
        assert "`if rank == 0:`" in message


def forgets():
    """An engine that is closed, or gone, is none that could be meant."""
    model, _, engine = start("single")
    _, _, other = start("single")
    engine.close()
    del engine
    try:
        smp_strategy.resume_from_checkpoint("nowhere")
    except CheckpointError:
        other.close()
    try:
        smp_strategy.resume_from_checkpoint("nowhere")
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_engines_are_forgotten_when_they_are_closed():
    of_the_parent = Model()  # anything that is alive
    active_engines.note(of_the_parent)
    assert "is meant: 0 of" in run_ranks(forgets, 1)[0]
    active_engines.forget(of_the_parent)
