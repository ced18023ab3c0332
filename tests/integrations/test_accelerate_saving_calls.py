"""What scripts do with a whole model: files of weights, hooks around checkpoints, and calls on one rank by mistake."""

import copy

import pytest
import torch
from accelerate import load_checkpoint_in_model
from accelerate_checks import adamw, assert_same, batches, fresh_accelerator, on_ranks
from safetensors.torch import load_file
from test_accelerate_saving import LAYOUTS, PP2, TP2, go_on, start, tied
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from smp_strategy.errors import UnsupportedError


def exports(smp, folder):
    run = start(smp)
    accelerator, model = run[:2]
    weights = go_on(run, batches()[:2])
    accelerator.save_model(model, folder / "one")
    accelerator.save_model(model, folder / "many", max_shard_size="2KB")
    accelerator.save_model(model, folder / "many", max_shard_size="4KB")  # fewer files than there are
    accelerator.save_model(model, folder / "pickled", safe_serialization=False)
    accelerator.save_model(model.blocks, folder / "part")
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), folder / "weights.pt")
    part = accelerator.get_state_dict(unwrapped.blocks[1])
    try:
        blocks = copy.deepcopy(unwrapped.blocks.state_dict())  # it is trained on
    except UnsupportedError as error:
        blocks = str(error)
    go_on(run, batches()[2:3])  # it can still be trained
    return weights, list(part), blocks


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2"])
def test_weights_are_written_for_one_process(layout, tmp_path):
    world_size, smp = LAYOUTS[layout]
    (weights, part, inside), *others = on_ranks(exports, world_size, smp, tmp_path)
    for folder in ("one", "many", "pickled"):
        fresh = tied(seed=9)
        load_checkpoint_in_model(fresh, tmp_path / folder)
        assert_same(fresh.state_dict(), weights)
    assert sorted(each.name for each in (tmp_path / "one").iterdir()) == ["model.safetensors"]
    # The second name of tied weights is left out, as safetensors and Accelerate do.
    assert list(load_file(tmp_path / "one" / "model.safetensors")) == sorted(weights.keys() - {"again.weight"})
    shards = {each.name for each in (tmp_path / "many").iterdir()} - {"model.safetensors.index.json"}
    assert shards == {f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)}
    blocks = tied(seed=9).blocks
    load_checkpoint_in_model(blocks, tmp_path / "part")
    assert torch.equal(blocks[3][0].weight, weights["blocks.3.0.weight"])
    assert part == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert_same(torch.load(tmp_path / "weights.pt", weights_only=True), weights)
    assert all(other == part for _, other, _ in others)
    if layout == "tp2":
        assert "call `model.save_pretrained` or `accelerator.get_state_dict(model)` on all ranks" in inside
        assert "trainer" not in inside
    else:
        assert_same(dict(inside), {name[7:]: each for name, each in weights.items() if name.startswith("blocks.")})


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=32, n_positions=16))


def exports_gpt2(smp, folder):
    accelerator = fresh_accelerator(smp)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, adamw(model))
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(accelerator.smp.data_rank))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    unwrapped = accelerator.unwrap_model(model)
    how = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    unwrapped.save_pretrained(folder / "one", **how, state_dict=accelerator.get_state_dict(model))
    unwrapped.save_pretrained(folder / "other", **how)
    accelerator.wait_for_everyone()
    assert type(unwrapped) is GPT2LMHeadModel
    accelerator.save_state(folder / "state")
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    optimizer.step()
    accelerator.load_state(folder / "state")
    box = [{**weights, "transformer.ln_f.bias": torch.ones(16)}]
    torch.distributed.broadcast_object_list(box)
    model.load_state_dict(box[0])
    return weights, accelerator.get_state_dict(model)


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_save_pretrained_writes_a_model_of_transformers(layout, tmp_path):
    expected, loaded = on_ranks(exports_gpt2, 2, {"pp2": PP2, "tp2": TP2}[layout], tmp_path)[0]
    assert_same(loaded, {**expected, "transformer.ln_f.bias": torch.ones(16)})
    for folder in ("one", "other"):
        found = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert_same(found.state_dict(), expected)
        assert found.lm_head.weight is found.transformer.wte.weight


class Hooks:
    """As scripts of diffusers have them: they save and load models their own way."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.seen = []

    def save(self, models, weights, output_dir):
        self.seen.append(sorted(len(each) for each in weights))
        if self.accelerator.is_main_process:
            for model in models:
                torch.save(model.state_dict(), f"{output_dir}/own.pt")
                weights.pop()

    def load(self, models, input_dir):
        while models:
            found = models.pop().load_state_dict(torch.load(f"{input_dir}/own.pt"))
            self.seen.append((found.missing_keys, found.unexpected_keys))


def saves_with_hooks(folder):
    run = start(PP2)
    accelerator = run[0]
    hooks = Hooks(accelerator)
    accelerator.register_save_state_pre_hook(hooks.save)
    handle = accelerator.register_load_state_pre_hook(hooks.load)
    go_on(run, batches()[:1])
    accelerator.save_state(folder)
    expected = go_on(run, batches()[1:3])
    accelerator.load_state(folder)
    found = go_on(run, batches()[1:3])
    handle.remove()
    return hooks.seen, expected, found


def test_hooks_of_the_user_run_and_meet_whole_models(tmp_path):
    (seen, expected, found), other = on_ranks(saves_with_hooks, 2, tmp_path / "state")
    names = len(tied().state_dict())
    assert seen == [[names], ([], [])]
    assert other[0] == [[names], ([], [])]
    assert_same(found, expected)
    assert not (tmp_path / "state" / "model.safetensors").exists()


class Average(nn.Module):
    """Registered for checkpointing."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(2))


def registers():
    run = start(PP2)
    accelerator, model, optimizer, _ = run
    average = Average()
    accelerator.register_for_checkpointing(average, model, optimizer)
    return run, average


def saves_objects(folder):
    run, average = registers()
    go_on(run, batches()[:2])
    with torch.no_grad():
        average.value.fill_(3.0)
    run[0].save_state(folder)
    expected = go_on(run, batches()[2:4])
    run, average = registers()
    run[0].load_state(folder)
    return average.value.tolist(), go_on(run, batches()[2:4]), expected


def test_registered_objects_are_saved_and_loaded_also_if_they_are_spread(tmp_path):
    value, found, expected = on_ranks(saves_objects, 2, tmp_path)[0]
    assert value == [3.0, 3.0]
    assert_same(found, expected)
    spread = torch.load(tmp_path / "custom_checkpoint_1.pkl", weights_only=True)
    assert list(spread) == list(tied().state_dict())


def on_one_rank(call, folder):
    run = start(PP2)
    accelerator, model = run[:2]
    go_on(run, batches()[:1])
    if accelerator.is_main_process and call is not None:
        {
            "save_model": lambda: accelerator.save_model(model, folder),
            "get_state_dict": lambda: accelerator.get_state_dict(model),
        }[call]()
    if call == "save_model":
        accelerator.wait_for_everyone()
    return go_on(run, batches()[1:2])


@pytest.mark.parametrize("call", ["save_model", "get_state_dict"])
def test_others_take_part_in_a_call_of_the_main_process_alone_and_training_goes_on(call, tmp_path):
    found = on_ranks(on_one_rank, 2, call, tmp_path)[0]
    assert_same(found, on_ranks(on_one_rank, 2, None, tmp_path)[0])


def alone_and_together():
    run = start(PP2)
    optimizer = run[2]
    go_on(run, batches()[:1])
    alone = optimizer.state_dict() if run[0].is_main_process else None
    together = optimizer.state_dict()
    run[0].wait_for_everyone()  # the other rank has taken the first call for its own, and takes part in the second here
    return alone, together


def test_the_state_of_an_optimizer_is_whole_for_the_main_process_alone():
    (alone, together), _ = on_ranks(alone_and_together, 2)
    assert len(alone["state"]) == len(together["state"]) > 0
    for number, state in together["state"].items():
        assert_same(alone["state"][number], state)


def scales(folder):
    smp = {**PP2, "fp16": True, "init_scale": 16.0, "scale_window": 2}
    run = start(smp)
    go_on(run, batches()[:3])
    run[0].save_state(folder)
    expected = run[0].scaler.get_scale(), go_on(run, batches()[3:5])
    again = start(smp, seed=3)
    again[0].load_state(folder)
    return expected, (again[0].scaler.get_scale(), go_on(again, batches()[3:5]))


def test_the_scale_of_the_loss_goes_on(tmp_path):
    expected, found = on_ranks(scales, 2, tmp_path)[0]
    assert found[0] == expected[0] != 16.0
    assert_same(found[1], expected[1])
    assert (tmp_path / "scaler.pt").exists()


def copies():
    """Of copies that were made before the model was spread, and of the model when it is done with."""
    run = start(PP2)
    accelerator, model = run[:2]
    before, average = model.state_dict(), copy.deepcopy(model)
    kept = {name: value.clone() for name, value in before.items()}
    go_on(run, batches()[:1])
    model.load_state_dict(kept)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert_same(weights, kept)
    assert_same(average.state_dict(), kept)
    assert_same(accelerator.get_state_dict(average), kept)
    accelerator.free_memory()
    return [name for name in vars(model) if name in ("forward", "state_dict", "load_state_dict")]


def test_copies_are_whole_and_the_model_gets_its_methods_back():
    assert on_ranks(copies, 2) == [[], []]
