"""Tensors of a checkpoint that is not read yet: user code sees ordinary ones, and what it leaves alone is not read."""

import copy
import pickle

import pytest
import torch

from smp_strategy.checkpoint.sources import EditedState, stored_tensor
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.model.deferred_tensor import DeferredTensor

VALUES = torch.arange(24.0).view(4, 6)


class Folder:
    """Checkpoint with one tensor ``a``."""

    objects = ()
    tensors = {"a": VALUES}

    def __init__(self):
        self.reads, self.fills = 0, 0

    def read(self, name):
        self.reads += 1
        return self.tensors[name].clone()

    def fill(self, wanted):
        self.fills += 1
        for name, held in wanted.items():
            held.blocks[0].tensor.copy_(self.tensors[name])


USES = {
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "split": lambda x: x.split(2)[1],
    "scaled": lambda x: x * 2,
    "cast": lambda x: x.to(torch.bfloat16),
    "mean": lambda x: x.double().mean(),
    "joined": lambda x: torch.cat([x, x]),
    "copied": copy.deepcopy,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("name", USES)
def test_results_are_ordinary_tensors(name):
    found = USES[name](stored_tensor(Folder(), "a"))
    assert type(found) is torch.Tensor
    assert torch.equal(found, USES[name](VALUES))


def filled(tensor):
    place = torch.zeros(tuple(tensor.shape))
    EditedState({"renamed": tensor}).fill({"renamed": HeldTensor.whole(place)})
    return place


def test_what_nobody_uses_is_filled_by_the_folder():
    folder = Folder()
    tensor = stored_tensor(folder, "a")
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.nbytes) == ((4, 6), torch.float32, VALUES.device, 96)
    assert isinstance(tensor.detach(), DeferredTensor)
    assert torch.equal(filled(tensor.detach()), VALUES)
    assert (folder.reads, folder.fills) == (0, 1)


def doubled(x):
    x.mul_(2)
    return x


def with_a_row(x):
    x[1] = 7
    return x


def with_a_number(x):
    x.numpy()[0, 0] = 7
    return x


@pytest.mark.parametrize("change", [doubled, with_a_row, with_a_number, lambda x: x[1:3]])
def test_changes_stay_and_are_read_once(change):
    folder = Folder()
    tensor = change(stored_tensor(folder, "a"))
    assert torch.equal(filled(tensor), change(VALUES.clone()))
    assert torch.equal(tensor + 0, change(VALUES.clone()))
    assert (folder.reads, folder.fills) == (1, 0)


def test_a_copy_into_a_parameter_keeps_nothing():
    tensor = stored_tensor(Folder(), "a")
    layer = torch.nn.Linear(6, 4, bias=False)
    layer.load_state_dict({"weight": tensor})
    assert torch.equal(layer.weight, VALUES)
    assert not tensor.is_kept
