"""Calls inside of ``if accelerator.is_main_process:``, as published scripts have them: the other ranks take part."""

import pytest
import torch
from accelerate_checks import adamw, assert_same, fresh_accelerator, on_ranks
from saved_models import VOCABULARY, contents, gpt2
from torch.utils.data import DataLoader

PP1, PP2 = {"pipeline_parallel_degree": 1}, {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
LAYOUTS = {
    "pp2": (2, PP2),
    "sdp2": (2, {**PP1, **SDP2}),
    "tp2": (2, {**PP1, "tensor_parallel_degree": 2}),
    "replicas": (2, PP1),
    "zero1": (2, {**PP1, "shard_optimizer_state": True}),
    "pp2 x sdp2": (4, {**PP2, **SDP2}),
    "pp2 x replicas": (4, PP2),
}
STEPS = 3
LOOPS = ["own batches", "gathers", "waits", "before the first step", "accumulates", "evaluates"]
# How often the replica of the main process and the others call the model before it saves.
UNEVEN = {"evaluates alone": (2, 0), "evaluates less": (1, 3), "evaluates more": (3, 1)}
WITHIN = ["has read a batch", "before backward"]


def save(name, accelerator, model, folder):
    """What the call has returned or written."""
    net = accelerator.unwrap_model(model)
    if name == "save_state":
        accelerator.save_state(folder)
    elif name == "save_model":
        accelerator.save_model(model, folder, max_shard_size="5KB")
    elif name == "save_pretrained":
        net.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    elif name == "save_pretrained of a part":
        net.transformer.save_pretrained(folder)
    elif name == "get_state_dict":
        net.save_pretrained(folder, state_dict=accelerator.get_state_dict(model))
    elif name == "state_dict":
        accelerator.save(net.state_dict(), folder / "weights.bin")
    else:
        raise AssertionError(name)


CALLS = ["save_state", "save_model", "save_pretrained", "save_pretrained of a part", "get_state_dict", "state_dict"]


def train(smp, folder, calls, is_main_alone, loop):
    accelerator = fresh_accelerator(smp, gradient_accumulation_steps=2 if loop == "accumulates" else 1)
    tokens = torch.randint(VOCABULARY, (16 * STEPS, 8), generator=torch.Generator().manual_seed(0))
    net = gpt2()
    loaders = [DataLoader(tokens, batch_size=4), DataLoader(tokens[:12], batch_size=4)]
    model, optimizer, loader, evaluation = accelerator.prepare(net, adamw(net), *loaders)

    def saves(moment, is_here=True):
        for name in calls if is_here else ():
            (folder / moment / name).mkdir(parents=True, exist_ok=True)
            if accelerator.is_main_process or not is_main_alone:
                save(name, accelerator, model, folder / moment / name)

    saves("begin", loop == "before the first step")
    for number, batch in enumerate(loader if loop != "own batches" else tokens.split(4)):
        if number == STEPS:
            break
        moment = loop if number == 1 else ""
        saves("midst", moment == "has read a batch")
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            saves("midst", moment == "before backward")
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        evaluate_unevenly(accelerator, net, tokens[:4], loop)
        saves("midst", loop not in WITHIN and number == (2 if loop == "accumulates" else 1))
        if loop == "evaluates":
            evaluate(model, evaluation, lambda is_first=number == 0: saves("between evaluated batches", is_first))
            saves(f"evaluated {number}")
        elif loop == "gathers":
            accelerator.gather(loss.detach())
        elif loop == "waits":
            accelerator.wait_for_everyone()
            saves("late")
    saves("end")
    if loop == "waits":
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return {name: value.clone() for name, value in net.state_dict().items()}


def evaluate(model, loader, each_time):
    model.eval()
    for batch in loader:
        with torch.no_grad():
            model(input_ids=batch, labels=batch)
        each_time()
    model.train()


def evaluate_unevenly(accelerator, net, batch, loop):
    mine, others = UNEVEN.get(loop, (0, 0))
    for _ in range(mine if accelerator.process_index == 0 else others):
        with torch.no_grad():
            net(input_ids=batch)


def compare(layout, folder, calls, loop):
    world_size, smp = LAYOUTS[layout]
    found = on_ranks(train, world_size, smp, folder / "alone", calls, True, loop)
    expected = on_ranks(train, world_size, smp, folder / "all", calls, False, loop)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    mine, theirs = contents(folder / "alone"), contents(folder / "all")
    assert sorted(mine) == sorted(theirs)
    # What torch.save and pickle write has names of folders and times in it.
    for name in theirs:
        if name.endswith((".safetensors", "index.json", "config.json")):
            assert mine[name] == theirs[name], name
    return mine


@pytest.mark.parametrize("layout", LAYOUTS)
def test_others_take_part_in_what_the_main_process_saves(layout, tmp_path):
    found = compare(layout, tmp_path, CALLS, "batches")
    for moment in ("midst", "end"):
        for call in CALLS:
            assert any(name.startswith(f"{moment}/{call}/") for name in found)


@pytest.mark.parametrize("loop", LOOPS + WITHIN)
@pytest.mark.parametrize("layout", ["pp2", "sdp2", "pp2 x replicas"])
def test_wherever_the_others_are(loop, layout, tmp_path):
    compare(layout, tmp_path, ["save_state", "save_pretrained"], loop)


@pytest.mark.parametrize("loop", UNEVEN)
@pytest.mark.parametrize("layout", ["replicas", "zero1", "pp2 x replicas"])
def test_replicas_call_the_model_different_numbers_of_times(loop, layout, tmp_path):
    compare(layout, tmp_path, ["save_state"], loop)
