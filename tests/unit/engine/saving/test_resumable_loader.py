"""Passes over loaders go on from their place."""

import pickle
import random
from copy import deepcopy

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from smp_strategy.distributed.rng_state import global_state, set_global_state
from smp_strategy.engine.data_readers import DataReaders
from smp_strategy.engine.saving.resumable_loader import follow, generators_of, pass_of
from smp_strategy.errors import CheckpointError
from smp_strategy.integrations.lightning.resume_progress import redistribute_positions

SAMPLES = 20


class Numbers(Dataset):
    """Draws for each sample, and counts how many were read."""

    def __init__(self, *, draws=True):
        self.draws, self.num_read = draws, 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.num_read += 1
        return index + (random.random() + float(torch.rand(())) if self.draws else 0.0)


class Drawing(BatchSampler):
    """Draws a number for each batch."""

    def __iter__(self):
        for batch in super().__iter__():
            random.random()
            yield batch


class Stream(IterableDataset):
    def __iter__(self):
        return (index + random.random() for index in range(SAMPLES))


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), 3),
    "shuffled": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "no batches": lambda: DataLoader(Numbers(), None, shuffle=True),
    "own generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "replaced": lambda: DataLoader(
        Numbers(), 3, sampler=RandomSampler(Numbers(), replacement=True, num_samples=50, generator=torch.Generator())
    ),
    "drawing sampler": lambda: DataLoader(Numbers(), batch_sampler=Drawing(RandomSampler(Numbers()), 3, False)),
    "stream": lambda: DataLoader(Stream(), 3),
    "workers": lambda: DataLoader(Numbers(), 3, shuffle=True, num_workers=1),
}


def followed(loader):
    alone = pickle.loads(pickle.dumps(DataReaders([0], 0, lambda: None, advice="")))
    follow(loader, alone)
    return loader


def values(batches):
    return [torch.as_tensor(batch).tolist() for batch in batches]


@pytest.mark.parametrize("num_unused", [0, 1])
@pytest.mark.parametrize("name", LOADERS)
def test_a_pass_goes_on_with_the_batches_that_were_not_used(name, num_unused):
    loader = followed(LOADERS[name]())
    for _ in range(2):  # in the first pass, and in one that comes later
        batches = iter(loader)
        given = [next(batches) for _ in range(4)]
        place, state = deepcopy(batches.place(num_unused)), global_state()
        rest = [*given[len(given) - num_unused :], *batches]

        again = followed(LOADERS[name]())
        resumed = iter(again)
        resumed.go_on(place)
        torch.manual_seed(99)
        random.seed(99)
        set_global_state(state)
        assert values(resumed) == values(rest)
        assert [g.get_state().tolist() for g in generators_of(again)] == [
            g.get_state().tolist() for g in generators_of(loader)
        ]


def test_samples_are_passed_over_where_nobody_notices():
    for loader, num_read in ((LOADERS["shuffled"](), 0), (LOADERS["drawing sampler"](), 12)):
        batches = iter(followed(loader))
        for _ in range(4):
            next(batches)
        place, state = batches.place(), global_state()
        loader.dataset.num_read = 0
        batches.go_on(place)
        set_global_state(state)
        next(batches)
        assert loader.dataset.num_read == num_read + 3


def test_what_others_draw_between_batches_is_drawn_again():
    loader = followed(LOADERS["stream"]())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
        random.random()
    place, state = batches.place(), global_state()
    rest = values(batches)
    batches.go_on(place)
    set_global_state(state)
    assert values(batches) == rest


def test_what_cannot_be_drawn_again_is_told(monkeypatch):
    monkeypatch.setattr("smp_strategy.engine.saving.resumable_loader._MAX_JUMPS", 2)
    batches = iter(followed(LOADERS["stream"]()))
    for _ in range(4):
        next(batches)
        random.random()
    batches.go_on(batches.place())
    with pytest.warns(UserWarning, match="Others have drawn random numbers between batches"):
        next(batches)


def test_a_pass_begins_again_with_the_generators_of_then():
    loader = followed(LOADERS["shuffled"]())
    state = global_state()
    expected = values(iter(loader))
    batches = iter(loader)
    batches.begin_again()
    set_global_state(state)
    assert values(batches) == expected


def test_a_loader_that_has_become_shorter_is_told():
    batches = iter(followed(LOADERS["shuffled"]()))
    for _ in range(4):
        next(batches)
    fewer = iter(followed(DataLoader(Numbers(), 10)))
    fewer.go_on(batches.place())
    with pytest.raises(CheckpointError, match="after 4 batches of an epoch, but the data loader has fewer now"):
        next(fewer)


def test_a_pass_is_known_as_long_as_it_is_used():
    loader = followed(LOADERS["shuffled"]())
    batches = iter(loader)
    assert pass_of(loader) is batches
    del batches
    assert pass_of(loader) is None
    assert pass_of([]) is None


def test_samples_are_dealt_out_again():
    place = {"num_given": 13, "num_unused": 1, "batch_size": 8, "loader": {}}
    [found], told = redistribute_positions([place], [16], 4, 2)
    assert (found["num_given"], found["num_unused"], told) == (12, 0, None)
    assert "loader" not in found
    [found], told = redistribute_positions([place], [8], 4, 2)
    assert (found["num_given"], told) == (24, None)
    [found], told = redistribute_positions([place], [5], 4, 3)
    assert found["num_given"] == 25
    assert told == "9 samples are no whole batch of each rank now, and are read again"
    [found], told = redistribute_positions([place], [None], 4, 3)
    assert found is None
    assert "begin their epoch anew" in told
