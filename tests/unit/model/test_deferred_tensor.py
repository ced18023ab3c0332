"""Deferred tensors compute what ordinary tensors do, and read their values only when these are needed."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smp_strategy.engine.pretrained import read_now
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor, defer, own_values, run_of, undefer

CPU = torch.device("cpu")
VALUES = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))


class File:
    """File with one tensor, which counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def tensor(self) -> DeferredTensor:
        return defer(VALUES.to("meta"), CPU, self._read)

    def _read(self) -> Tensor:
        self.reads += 1
        return VALUES.clone()


MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "narrow": lambda x: x[x.shape[0] // 2 :],
    "chunk": lambda x: x.chunk(2, dim=1)[-1],
    "view": lambda x: x.reshape(-1, 2, x.shape[-1] // 2).transpose(1, 2).reshape(x.shape[0], -1),
    "cat": lambda x: torch.cat([x, x * 2]),
    "stack": lambda x: torch.stack([x, x.clone()]).flatten(0, 1),
    "half": lambda x: x.to(torch.bfloat16).float(),
    "contiguous": lambda x: x.contiguous(),
    "unbind": lambda x: torch.stack(x.unbind(0)),
    "weight norm": lambda x: torch._weight_norm(x, x.narrow(1, 0, 1) + 2, 0),
}
CHANGE: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda x: x.mul_(0.5),
    "row": lambda x: x[0].fill_(3),
    "data": lambda x: x.data.add_(1),
    "number": lambda x: x[-1, 1:].copy_(torch.tensor(2.0)),
    "column": lambda x: x[:, :1].add_(torch.linspace(0, 1, len(x))[:, None]),
    "where": lambda x: x.masked_fill_(x > 1, 5),
    "copy_": lambda x: x[: len(x) // 2].copy_(x[len(x) - len(x) // 2 :].clone()),
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*MAKE, *CHANGE]), max_size=8))
def test_any_operations_give_what_ordinary_tensors_give(names):
    deferred, ordinary = [File().tensor()], [VALUES.clone()]
    for name in names:
        for made in (deferred, ordinary):
            if name in MAKE and made[-1].numel() < 20_000 and len(made[-1]) > 1 and made[-1].shape[-1] % 2 == 0:
                made.append(MAKE[name](made[-1]))
            elif name in CHANGE and made[-1].numel():
                CHANGE[name](made[-1])
    assert len(deferred) == len(ordinary)
    for found, expected in zip(deferred, ordinary, strict=True):
        values = own_values(found) if isinstance(found, DeferredTensor) else found
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        assert torch.equal(values, expected)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_made_of_deferred_tensors_alone_reads_nothing(name):
    file = File()
    made = MAKE[name](file.tensor())
    assert isinstance(made, DeferredTensor)
    assert file.reads == 0


def test_parameters_keep_their_identity_through_casts_and_ties():
    file, layer, head = File(), nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
    layer.weight = head.weight = weight = nn.Parameter(file.tensor())
    nn.Sequential(layer, head).to(torch.bfloat16)
    assert layer.weight is head.weight is weight
    assert (weight.dtype, weight.device, weight.is_leaf) == (torch.bfloat16, CPU, True)
    assert file.reads == 0
    assert torch.equal(own_values(weight), VALUES.bfloat16())


def test_reads_are_forgotten_and_changes_stay():
    file = File()
    weight = nn.Parameter(file.tensor())
    assert weight.norm().item() == VALUES.norm().item()
    assert not weight.is_kept
    with torch.no_grad():
        weight[0].normal_()
    assert weight.is_kept
    assert torch.equal(own_values(weight)[1:], VALUES[1:])
    assert not own_values(weight)[0].eq(VALUES[0]).any()


def test_changes_by_numbers_read_nothing():
    file, number = File(), torch.tensor(9.0)
    weight = nn.Parameter(file.tensor())
    before, second = weight.detach() * 2, weight.detach()[1]
    with torch.no_grad():
        nn.init.zeros_(weight[0])
        weight[1] = number
    number.zero_()
    assert file.reads == 0
    expected = VALUES.clone()
    expected[0], expected[1] = 0, 9
    for _ in range(2):
        assert torch.equal(own_values(weight), expected)
        assert torch.equal(own_values(second), expected[1])
        assert torch.equal(own_values(before), VALUES * 2)


def test_values_that_are_replaced_are_not_read():
    file, others = File(), torch.randn(48, 64)
    weight = nn.Parameter(file.tensor())
    before = weight.detach() * 2
    weight.data.copy_(others)
    normal = torch._weight_norm(file.tensor(), file.tensor().narrow(1, 0, 1), 0)
    with torch.no_grad():
        normal.normal_(generator=None)
        with pytest.raises(RuntimeError):
            nn.Parameter(file.tensor()).copy_(torch.ones(3))
    assert file.reads == 1  # for the last one, as the error is that of torch
    assert torch.equal(own_values(weight), others)
    assert torch.equal(own_values(before), VALUES * 2)


def test_changes_by_tensors_keep_values_which_ranks_can_exchange():
    weight = File().tensor()
    weight[1] = torch.randn(64)
    assert weight.is_kept


def test_many_changes_by_numbers():
    weight = File().tensor()
    for number in range(3000):
        weight[number % 48].fill_(number)
    assert own_values(weight)[:, 0].tolist() == [*range(2976, 3000), *range(2952, 2976)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(torch.ones(3)),
        lambda x: x[99].zero_(),
        lambda x: x.index_fill_(0, torch.tensor([99]), 0.0),
        lambda x: x.t_(),
    ],
    ids=["shape", "row", "index", "in-place view"],
)
def test_wrong_changes_are_errors_at_once(change):
    with pytest.raises((RuntimeError, IndexError, UnsupportedError)):
        change(File().tensor())


def test_layers_compute_with_deferred_weights():
    inputs, weight = torch.randn(3, 64), nn.Parameter(File().tensor())
    result = nn.functional.linear(inputs, weight)
    assert torch.equal(result, nn.functional.linear(inputs, VALUES))
    result.sum().backward()
    assert torch.allclose(weight.grad, inputs.sum(0).expand(48, 64))


def test_new_tensors_like_a_deferred_one_are_ordinary():
    file = File()
    weight = file.tensor()
    for made in (torch.zeros_like(weight), weight.new_empty(3), torch.randn_like(weight), weight.new_tensor([1.0])):
        assert type(made) is Tensor
        assert made.device == CPU
    assert file.reads == 0


def test_embeddings_are_enlarged_as_in_transformers():
    weight, larger = nn.Parameter(File().tensor()), nn.Embedding(50, 64)
    larger.weight.data[:48, :] = weight.data[:48, :]
    larger.weight.data[48:, :] = weight.data.mean(0)
    weight.data = larger.weight.data
    assert weight.shape == (50, 64)
    assert torch.equal(own_values(weight)[:48], VALUES)
    assert torch.equal(own_values(weight)[49], VALUES.mean(0))


def test_copies_are_deferred_and_apart():
    weight = nn.Parameter(File().tensor(), requires_grad=False)
    copied = copy.deepcopy(weight)
    assert isinstance(copied, nn.Parameter)
    assert not copied.requires_grad
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(own_values(copied), VALUES)


def test_pickles_have_the_values():
    found = pickle.loads(pickle.dumps(nn.Parameter(File().tensor())))
    assert type(found) is nn.Parameter
    assert torch.equal(found, VALUES)


def test_memory_of_numpy_and_lists():
    weight = File().tensor()
    assert weight.tolist() == VALUES.tolist()
    assert (weight.numpy() == VALUES.numpy()).all()


def test_on_the_meta_device_again_in_place():
    weight = nn.Parameter(File().tensor())
    weight.register_hook(lambda gradient: gradient)
    source = undefer(weight)
    assert (type(weight), weight.is_meta) == (nn.Parameter, True)
    assert isinstance(source, DeferredTensor)
    assert torch.equal(own_values(source), VALUES)


def test_changed_tensors_become_ordinary_ones():
    layer = nn.Linear(64, 48, bias=False)
    layer.weight = weight = nn.Parameter(File().tensor())
    with torch.no_grad():
        weight.mul_(torch.full((48, 64), 2.0))
    assert undefer(weight) is weight
    assert torch.equal(weight, VALUES * 2)
    layer.weight = other = nn.Parameter(File().tensor())
    read_now(layer)
    assert type(other) is nn.Parameter
    assert torch.equal(other, VALUES)


class FileOfRuns:
    """File with one tensor, which counts the elements that are read."""

    def __init__(self) -> None:
        self.read = 0

    def tensor(self) -> DeferredTensor:
        return defer(VALUES.to("meta"), CPU, lambda: self._run(0, VALUES.numel()).view(VALUES.shape), self._run)

    def _run(self, start: int, stop: int) -> Tensor:
        self.read += stop - start
        return VALUES.flatten()[start:stop].clone()


OF_RUNS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "parameter": lambda x: nn.Parameter(x[...]),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "rows of a cast": lambda x: x.double()[8:40],
    "cast rows": lambda x: x[8:].chunk(2)[1].half(),
    "reshaped": lambda x: x.view(-1, 2, 64)[3:].unsqueeze(0),
    "one row": lambda x: x[7],
}


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_run_of_elements_is_read_alone(name):
    file = FileOfRuns()
    deferred, expected = OF_RUNS[name](file.tensor()), OF_RUNS[name](VALUES.clone()).flatten()
    for start, stop in ((0, 0), (5, 50), (0, len(expected))):
        before = file.read
        assert torch.equal(run_of(deferred, start, stop), expected[start:stop])
        assert file.read - before == stop - start


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, 8:40],
        lambda x: x * 2,
        lambda x: torch.cat([x, x]),
        lambda x: x.view(torch.int32),
        lambda x: x[8:].as_strided((2, 64), (64, 1), 64),
        lambda x: x.t().clone(),
        lambda x: x[:1].expand(3, -1),
    ],
)
def test_runs_of_other_tensors_have_the_same_values(make):
    deferred, expected = make(FileOfRuns().tensor()), make(VALUES.clone()).reshape(-1)
    assert torch.equal(run_of(deferred, 30, 90), expected[30:90])


def test_a_run_has_the_values_of_its_time():
    tensor = FileOfRuns().tensor()
    cast = tensor.double()
    with torch.no_grad():
        tensor[0].fill_(3)
    assert torch.equal(run_of(cast, 0, 70), VALUES.flatten()[:70].double())
    assert torch.equal(run_of(tensor, 0, 64), torch.full((64,), 3.0))


def test_a_cast_of_a_tensor_that_changes_afterwards_is_read_in_runs_of_the_old_values():
    def run(start, stop):
        return VALUES.reshape(-1)[start:stop].clone()

    weight = defer(VALUES.to("meta"), CPU, VALUES.clone, run)
    half = weight.to(torch.bfloat16)
    with torch.no_grad():
        weight[:2].mul_(2)
    assert torch.equal(run_of(half, 10, 90), VALUES.bfloat16().reshape(-1)[10:90])
    assert torch.equal(run_of(weight, 10, 90), own_values(weight).reshape(-1)[10:90])
    assert torch.equal(own_values(weight)[:2], VALUES[:2] * 2)


def test_a_look_at_a_small_tensor_does_not_part_it_from_its_file():
    small = defer(VALUES[0].to("meta"), CPU, VALUES[0].clone)
    small.norm().item()
    with torch.no_grad():
        small.mul_(2)
    assert not small.is_changed
    assert small.history == ("aten.mul_.Tensor[2]",)
    assert torch.equal(own_values(small), VALUES[0] * 2)
