"""Stand-ins look like the tensors of a state dict, and their recipes give the values that the tensors would have."""

import pickle

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from smp_strategy.checkpoint.stand_in import EntryRecipe, StandIn, entries_of, value_of
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import UnsupportedError

CONVERSIONS = {
    "nothing": lambda a, b: [a],
    "split": lambda a, b: [part.contiguous() for part in a.chunk(2, dim=0)],
    "experts": lambda a, b: [part.squeeze(0) for part in a.chunk(4, dim=0)],
    "joined": lambda a, b: [torch.cat([a, b], dim=1), torch.stack([b, a])],
    "interleaved": lambda a, b: [a.reshape(2, 2, 6).transpose(0, 1).reshape(a.shape).contiguous()],
    "other dtypes": lambda a, b: [a.to(torch.bfloat16), b.float().half(), a.to("cpu")],
    "pieces": lambda a, b: [a[1:3].detach().clone(), b[0], a.t(), b.unbind(1)[2]],
    "joined and split": lambda a, b: list(torch.cat([a, b]).split([3, 5])),
}


def stand_ins():
    info = LocalTensorInfo((4, 6), torch.float32)
    return StandIn(info, EntryRecipe("a")), StandIn(info, EntryRecipe("b"))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_recipes_give_the_values_of_the_operations(name):
    values = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    found = CONVERSIONS[name](*stand_ins())
    expected = CONVERSIONS[name](values["a"], values["b"])
    recipes = pickle.loads(pickle.dumps([each.recipe for each in found]))
    done = {}
    for stand_in, recipe, value in zip(found, recipes, expected, strict=True):
        assert (tuple(stand_in.shape), stand_in.dtype, stand_in.stride()) == (
            tuple(value.shape),
            value.dtype,
            value.stride(),
        )
        assert torch.equal(value_of(recipe, values, done), value)
        assert entries_of(recipe) <= {"a", "b"}


def test_entries_are_those_that_are_needed():
    a, b = stand_ins()
    assert entries_of(a.recipe) == {"a"}
    assert entries_of(a.chunk(2)[1].contiguous().recipe) == {"a"}
    assert entries_of((a.t() @ b).recipe) == {"a", "b"}


def test_libraries_split_them_into_files_as_they_split_tensors():
    a, b = stand_ins()
    for x, y in ((a, b), (torch.zeros(4, 6), torch.zeros(4, 6))):
        state = {"x": x, "tied": x, "y": y, **{f"part.{number}": part for number, part in enumerate(y.chunk(4))}}
        split = split_torch_state_dict_into_shards(state, max_shard_size=100)
        assert split.filename_to_tensors == {
            "model-00001-of-00002.safetensors": ["x", "tied"],
            "model-00002-of-00002.safetensors": ["y", "part.0", "part.1", "part.2", "part.3"],
        }


def test_what_needs_values_or_changes_them_is_refused():
    a, _ = stand_ins()
    for use in (lambda: a.add_(1), lambda: a.zero_()):
        with pytest.raises(UnsupportedError, match="no rank has it there"):
            use()
    assert repr(a) == "StandIn([4, 6], torch.float32)"
