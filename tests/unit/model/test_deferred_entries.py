"""Deferred entries look like the tensors of a state dict, and their recipes give the values that these would have."""

import pickle

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_tensor import entries_of, entry

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


def two_entries():
    return entry("a", (4, 6), torch.float32), entry("b", (4, 6), torch.float32)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_recipes_give_the_values_of_the_operations(name):
    values = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    found = CONVERSIONS[name](*two_entries())
    expected = CONVERSIONS[name](values["a"], values["b"])
    recipes = pickle.loads(pickle.dumps([each.recipe for each in found]))
    known = dict(values)
    for made, recipe, value in zip(found, recipes, expected, strict=True):
        assert (tuple(made.shape), made.dtype, made.stride()) == (
            tuple(value.shape),
            value.dtype,
            value.stride(),
        )
        assert torch.equal(recipe.value(known), value)
        assert entries_of(recipe) <= {"a", "b"}


def test_entries_are_those_that_are_needed():
    a, b = two_entries()
    assert entries_of(a.recipe) == {"a"}
    assert entries_of(a.chunk(2)[1].contiguous().recipe) == {"a"}
    assert entries_of((a.t() @ b).recipe) == {"a", "b"}


def test_libraries_split_them_into_files_as_they_split_tensors():
    a, b = two_entries()
    for x, y in ((a, b), (torch.zeros(4, 6), torch.zeros(4, 6))):
        state = {"x": x, "tied": x, "y": y, **{f"part.{number}": part for number, part in enumerate(y.chunk(4))}}
        split = split_torch_state_dict_into_shards(state, max_shard_size=100)
        assert split.filename_to_tensors == {
            "model-00001-of-00002.safetensors": ["x", "tied"],
            "model-00002-of-00002.safetensors": ["y", "part.0", "part.1", "part.2", "part.3"],
        }


def test_what_needs_values_or_changes_them_is_refused():
    a, _ = two_entries()
    part = a.chunk(2)[1].contiguous()
    uses = [lambda: a.add_(1), lambda: a.zero_(), lambda: a[0, 0].item(), a.tolist, lambda: pickle.dumps(part)]
    for use in [*uses, lambda: torch.rand_like(a), lambda: part.uniform_()]:
        with pytest.raises(UnsupportedError, match="no rank has it there"):
            use()
    assert repr(a) == "DeferredTensor([4, 6], torch.float32, not read yet)"


def test_ordinary_tensors_of_an_operation_travel_with_the_recipe():
    a, _ = two_entries()
    order = torch.tensor([2, 0, 1, 3])
    recipe = pickle.loads(pickle.dumps((a[order] * torch.tensor(2.0)).recipe))
    value = torch.randn(4, 6)
    assert torch.equal(recipe.value({"a": value}), value[order] * 2)


def test_views_have_the_storage_of_their_entry_and_results_their_own():
    a, b = two_entries()
    storage = a.untyped_storage()
    assert storage.nbytes() == 4 * 6 * 4
    assert a[2].untyped_storage().data_ptr() == storage.data_ptr() != b.untyped_storage().data_ptr()
    assert a[2].data_ptr() - a.data_ptr() == 2 * 6 * 4
    made = a[2].clone()
    assert made.untyped_storage().data_ptr() != storage.data_ptr()
    assert made.untyped_storage().nbytes() == 6 * 4
    assert made.device == torch.device("cpu")
