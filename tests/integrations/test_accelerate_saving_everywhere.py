"""Scripts that never ask for the rank: what they write on every rank is whole on every rank."""

import copy
import pickle

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from accelerate_checks import adamw, assert_same, batches, fresh_accelerator, loss_inside, mine, on_ranks, toy
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from test_accelerate_saving_calls import gpt2
from torch import nn
from transformers import GPT2LMHeadModel

from smp_strategy import UnsupportedError

PP1 = {"pipeline_parallel_degree": 1}
LAYOUTS = {
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp2 x 2": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "sdp2": (2, {**PP1, "sharded_data_parallel_degree": 2}),
    "tp2": (2, {**PP1, "tensor_parallel_degree": 2, "tensor_parallel": {"blocks.*.0": "column"}}),
    "zero1": (2, {**PP1, "shard_optimizer_state": True}),
}


def trained(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for batch in batches(2):
        accelerator.backward(loss_inside(model, mine(accelerator, batch)))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def write_everything(smp, folder):
    accelerator, model, optimizer = trained(smp)
    own = folder / str(torch.distributed.get_rank())
    own.mkdir()
    for where in (folder, own):  # a file that all ranks write, and one of this rank alone
        torch.save(model.state_dict(), where / "model.pt")
        torch.save(accelerator.get_state_dict(model), where / "got.pt")
        save_file(accelerator.unwrap_model(model).state_dict(), where / "model.safetensors")
        (where / "model.pkl").write_bytes(pickle.dumps(copy.deepcopy(model.state_dict())))
        torch.save({"model": accelerator.get_state_dict(model.blocks)}, where / "part.pt")
        if accelerator.smp.shape.tp == 1:
            torch.save({"model": model.blocks.state_dict()}, where / "own part.pt")
        torch.save(optimizer.state_dict(), where / "optimizer.pt")
    accelerator.wait_for_everyone()
    got = accelerator.get_state_dict(model)
    got["outlet.bias"].zero_()  # what one rank does to its copy concerns no other
    accelerator.wait_for_everyone()
    if accelerator.smp.shape.tp > 1:
        with pytest.raises(UnsupportedError, match="this rank's part of"):
            model.blocks.state_dict()
    if accelerator.smp.shape.pp > 1:
        with pytest.raises((UnsupportedError, TypeError, AttributeError, pickle.PicklingError)):
            torch.save(model, own / "x")
    return accelerator.get_written_state_dict(model), accelerator.get_optimizer_state_dict(optimizer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_every_rank_writes_is_whole(layout, tmp_path):
    world, smp = LAYOUTS[layout]
    weights, state = on_ranks(write_everything, world, smp, tmp_path)[0]
    assert len(weights) == 12
    assert len(state["state"]) == 12
    for folder in (tmp_path, *(tmp_path / str(rank) for rank in range(world))):
        assert_same(torch.load(folder / "model.pt", weights_only=True), weights)
        assert_same(torch.load(folder / "got.pt", weights_only=True), weights)
        assert_same(load_file(folder / "model.safetensors"), dict(sorted(weights.items())))
        assert_same(pickle.loads((folder / "model.pkl").read_bytes()), weights)
        blocks = {name.removeprefix("blocks."): each for name, each in weights.items() if name.startswith("blocks.")}
        for part in ("part.pt", *(("own part.pt",) if layout != "tp2" else ())):
            assert_same(torch.load(folder / part, weights_only=True)["model"], blocks)
        found = torch.load(folder / "optimizer.pt", weights_only=True)
        assert found["param_groups"] == state["param_groups"]
        assert found["state"].keys() == state["state"].keys()
        for number, kept in state["state"].items():
            assert_same(found["state"][number], kept)


def pretrained(smp, folder):
    accelerator = fresh_accelerator(smp)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, adamw(model))
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(accelerator.smp.data_rank))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    own = folder / str(torch.distributed.get_rank())
    model.save_pretrained(folder / "all")
    model.save_pretrained(own / "one")
    accelerator.unwrap_model(model).save_pretrained(own / "two", state_dict=accelerator.get_state_dict(model))
    accelerator.wait_for_everyone()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_save_pretrained_on_every_rank_writes_whole_models(layout, tmp_path):
    world, smp = LAYOUTS[layout]
    expected, *others = on_ranks(pretrained, world, smp, tmp_path)
    for other in others:
        assert_same(other, expected)
    for folder in ("all", "0/one", "0/two"):  # transformers itself writes on rank 0 only
        found = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert_same(found.state_dict(), expected)
        assert found.lm_head.weight is found.transformer.wte.weight


def adapted(smp, folder):
    accelerator = fresh_accelerator(smp)
    model = get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    model, optimizer = accelerator.prepare(model, adamw(model))
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(accelerator.smp.data_rank))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    model.save_pretrained(folder / str(torch.distributed.get_rank()))
    return get_peft_model_state_dict(model)


@pytest.mark.parametrize("layout", ["pp2", "zero1"])
def test_adapters_are_whole_on_every_rank(layout, tmp_path):
    world, smp = LAYOUTS[layout]
    expected, *others = on_ranks(adapted, world, smp, tmp_path)
    assert len(expected) == 6
    for other in others:
        assert_same(other, expected)
    for rank in range(world):
        found = load_file(tmp_path / str(rank) / "adapter_model.safetensors")
        assert_same(found, dict(sorted(expected.items())))


class Averaged(nn.Module):
    """Norms with running statistics."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))

    def forward(self, inputs, targets=None):
        for block in self.blocks:
            inputs = block(inputs)
        return {"loss": inputs.square().mean()} if targets is not None else {"logits": inputs}


def statistics(smp, loss_of, **options):
    accelerator = fresh_accelerator(smp, **options)
    model = Averaged()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for batch in batches(3):
        accelerator.backward(loss_of(model, mine(accelerator, batch)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: each for name, each in model.named_buffers() if "running" in name}


def outside(model, batch):
    return model(batch["inputs"])["logits"].square().mean()


@pytest.mark.parametrize("loss_of", [loss_inside, outside])
@pytest.mark.parametrize("layout", ["sdp2", "zero1"])
def test_buffers_of_replicas_are_those_of_the_first(layout, loss_of):
    world, smp = LAYOUTS[layout]
    first, *others = on_ranks(statistics, world, smp, loss_of)
    assert any(value.abs().sum() > 0 for value in first.values())
    for other in others:
        assert_same(other, first)


def apart(smp):
    return statistics(smp, loss_inside, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


@pytest.mark.parametrize("layout", ["sdp2", "zero1"])
def test_and_their_own_if_distributed_data_parallel_is_told_so(layout):
    world, smp = LAYOUTS[layout]
    first, other = on_ranks(apart, world, smp)
    assert all(not torch.equal(first[name], other[name]) for name in first)
