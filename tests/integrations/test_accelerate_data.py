"""Every replica reads what a process of plain Accelerate reads, and all ranks of a replica the same."""

import os
import pickle
import random

import accelerate
import numpy
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from accelerate_checks import Samples, adamw, batches, fresh_accelerator, mine, on_ranks, toy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
# Both ranks split the layers between them, and read samples of their own.
OWN_SAMPLES = {"tensor_parallel_degree": 2, "prescaled_batch": False}
COUNT, BATCH = 22, 4


class Numbers(Dataset):
    """Numbers and labels, augmented with all three generators."""

    def __init__(self, *, noisy=False):
        self.noisy = noisy
        self.epoch = 0

    def __len__(self):
        return COUNT

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + float(numpy.random.rand()) if self.noisy else torch.zeros(())
        return {"x": index + 100 * self.epoch + noise, "name": f"sample {index}"}


class Tensors(Dataset):
    """Without labels: what the main process dispatches is tensors."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": index + torch.rand(())}


class Stream(IterableDataset):
    """Augmented with the global generator."""

    def __len__(self):
        return COUNT

    def __iter__(self):
        for index in range(COUNT):
            yield {"x": index + torch.rand(())}


class PythonShuffle(BatchSampler):
    """A batch sampler of the user's own, which shuffles with Python's generator."""

    def __init__(self):
        super().__init__(range(COUNT), BATCH, drop_last=False)

    def __iter__(self):
        order = list(range(COUNT))
        random.shuffle(order)
        for start in range(0, COUNT, BATCH):
            yield order[start : start + BATCH]


def loader(dataset=None, **options):
    return DataLoader(dataset or Numbers(), **{"batch_size": BATCH, **options})


def own_generator():
    return RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(3))


# Loader, options of DataLoaderConfiguration.
CASES = {
    "in order": (loader, {}),
    "last batch dropped": (lambda: loader(drop_last=True), {}),
    "shuffled": (lambda: loader(shuffle=True), {}),
    "shuffled by a generator": (lambda: loader(sampler=own_generator()), {}),
    "shuffled by a seedable sampler": (lambda: loader(shuffle=True), {"use_seedable_sampler": True}),
    "shuffled by a seed": (lambda: loader(shuffle=True), {"use_seedable_sampler": True, "data_seed": 5}),
    "batches are split": (lambda: loader(shuffle=True), {"split_batches": True}),
    "uneven": (lambda: loader(shuffle=True), {"even_batches": False}),
    "uneven split": (loader, {"even_batches": False, "split_batches": True}),
    "augmented": (lambda: loader(Numbers(noisy=True), shuffle=True), {"non_blocking": True}),
    "augmented in workers": (lambda: loader(Numbers(noisy=True), shuffle=True, num_workers=1), {}),
    "own batch sampler": (lambda: DataLoader(Numbers(), batch_sampler=PythonShuffle()), {}),
    "stream": (lambda: loader(Stream()), {}),
    "stream, last batch dropped": (lambda: loader(Stream(), drop_last=True), {}),
    "stream, split": (lambda: loader(Stream()), {"split_batches": True}),
    "stream, read by all": (lambda: loader(Stream()), {"dispatch_batches": False}),
    "dispatched": (lambda: loader(Tensors(), shuffle=True), {"dispatch_batches": True}),
}


def read_all():
    """All cases, each twice through; plain Accelerate does it, too."""
    return {name: read(*case) for name, case in CASES.items()}


def read(make, options, *, rest_of=lambda accelerator, loader: loader, epochs=2):
    accelerator = accelerator_with(options)
    set_seed(7)
    prepared = accelerator.prepare(make())
    found = [len(prepared), prepared.total_batch_size if "dispatch" not in str(type(prepared)).lower() else None]
    for epoch in range(epochs):
        if epoch == 1:
            prepared.set_epoch(3)
        for batch in rest_of(accelerator, prepared):
            state = accelerator.gradient_state
            found.append((batch, float(torch.rand(())), random.random(), state.end_of_dataloader, state.remainder))
            if accelerator.is_main_process:  # to show a sample, say
                torch.rand(3), random.random(), numpy.random.rand()
    return found


def accelerator_with(options):
    smp = SMP[0]
    config = DataLoaderConfiguration(**options)
    if smp is not None:
        return fresh_accelerator(smp, dataloader_config=config)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, dataloader_config=config)


SMP = [None]  # the layout in this process; a forked rank has a list of its own


def under(smp, body, *args):
    SMP[0] = smp
    return body(*args)


def same(first, second):
    """Nested lists, tuples and dicts whose tensors are equal."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.fixture(scope="module")
def plain():
    """What processes of plain Accelerate read, for each number of them."""
    return {number: on_ranks(under, number, None, read_all) for number in (1, 2)}


@pytest.fixture(scope="module", params=[(PP2, 2, 1), (PP2, 4, 2), (OWN_SAMPLES, 2, 2)], ids=["pp2", "pp2xdp2", "tp2"])
def layout(request):
    """What each rank reads, and the number of plain processes that read the same."""
    smp, ranks, processes = request.param
    return on_ranks(under, ranks, smp, read_all), processes


@pytest.mark.parametrize("case", CASES)
def test_replicas_read_what_processes_of_plain_accelerate_read(case, plain, layout):
    found, processes = layout
    for rank, each in enumerate(found):
        expected = plain[processes][rank * processes // len(found)][case]
        assert same(each[case], expected), (rank, each[case], expected)


# Passes that begin later


def rest_by_method(accelerator, prepared):
    return accelerator.skip_first_batches(prepared, 1)


def rest_by_function(accelerator, prepared):
    return accelerate.skip_first_batches(prepared, 1)


def read_rests():
    noisy, dispatched = CASES["augmented"], CASES["stream"]
    return [read(*case, rest_of=rest) for case in (noisy, dispatched) for rest in (rest_by_method, rest_by_function)]


def test_a_pass_may_begin_later():
    for processes in (1, 2):
        expected = on_ranks(under, processes, None, read_rests)
        for rank, found in enumerate(on_ranks(under, 2 * processes, PP2, read_rests)):
            assert same(found, expected[rank // 2])


# Loaders with a state


def resume():
    """What is read before and after the state of a loader is given to another one."""
    found = []
    for name in ("augmented", "augmented in workers", "stream, read by all"):
        make, options = CASES[name]
        seen, state = [], None
        for _ in range(2):
            accelerator = accelerator_with({**options, "use_stateful_dataloader": True})
            set_seed(7)
            prepared = accelerator.prepare(make())
            if state is not None:
                prepared.load_state_dict(state)
            for batch in prepared:
                seen.append(batch)
                if state is None and len(seen) == 2:
                    state = prepared.state_dict()
                    break
        found.append(seen)
    return found


def test_a_stateful_loader_goes_on_where_another_was():
    pytest.importorskip("torchdata")
    for processes in (1, 2):
        expected = on_ranks(under, processes, None, resume)
        for rank, found in enumerate(on_ranks(under, 2 * processes, PP2, resume)):
            assert same(found, expected[rank // 2])


def dispatch_with_state():
    accelerator_with({"use_stateful_dataloader": True}).prepare(loader(Stream()))


def test_a_stateful_loader_cannot_be_dispatched():
    pytest.importorskip("torchdata")
    with pytest.raises(RuntimeError, match="Set `dispatch_batches=False`"):
        on_ranks(under, 2, PP2, dispatch_with_state)


# Nobody has seeded anything


def unseed():
    """As in a script that seeds nothing: every rank begins somewhere else."""
    seed = int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


UNSEEDED = {
    "shuffled": (lambda: loader(shuffle=True), {}),
    "shuffled by a seedable sampler": (lambda: loader(shuffle=True), {"use_seedable_sampler": True}),
    "shuffled by a generator of each rank": (
        lambda: loader(sampler=RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(os.getpid()))),
        {},
    ),
    "augmented in workers": (lambda: loader(Numbers(noisy=True), num_workers=1), {}),
    "own batch sampler": (lambda: DataLoader(Numbers(), batch_sampler=PythonShuffle()), {}),
    "stream, read by all": (lambda: loader(Stream()), {"dispatch_batches": False}),
}


def read_unseeded():
    found = {}
    for name, (make, options) in UNSEEDED.items():
        accelerator = fresh_accelerator(PP2, dataloader_config=DataLoaderConfiguration(**options))
        unseed()
        prepared = accelerator.prepare(make())
        found[name] = [[(batch, float(torch.rand(()))) for batch in prepared] for _ in range(2)]
    return found


def test_unseeded_ranks_of_a_replica_read_the_same():
    first, second, third, fourth = on_ranks(read_unseeded, 4)
    assert same(first, second)
    assert same(third, fourth)
    for name in ("shuffled", "shuffled by a seedable sampler", "shuffled by a generator of each rank"):
        epochs = [
            [label for read in (first, third) for batch, _ in read[name][epoch] for label in batch["name"]]
            for epoch in range(2)
        ]
        assert epochs[0] != epochs[1], "the second epoch must have an order of its own"
        for labels in epochs:
            assert set(labels) == {f"sample {index}" for index in range(COUNT)}
            assert len(labels) == 24, "two samples from the start fill up the last batches"


# What differs is found


class Augmented(Dataset):
    """Draws by a generator that the system seeds, as numpy's does."""

    def __init__(self):
        self.generator = numpy.random.default_rng()

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": torch.tensor([index, *self.generator.random(2)])}


def read_augmented(smp, num_workers, shuffle, options):
    accelerator = fresh_accelerator(smp, dataloader_config=DataLoaderConfiguration(**options))
    prepared = accelerator.prepare(DataLoader(Augmented(), batch_size=2, shuffle=shuffle, num_workers=num_workers))
    return accelerator.smp.data_rank, [[batch["x"].tolist() for batch in prepared] for _ in range(2)]


@pytest.mark.parametrize("smp", [PP2, {**PP2, "share_batches": True}], ids=["of itself", "option"])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_samples_drawn_by_generators_of_the_system_are_those_of_the_first_rank(ranks, num_workers, smp):
    found = on_ranks(read_augmented, ranks, smp, num_workers, True, {"dispatch_batches": False})
    seen = dict(found)
    assert len(seen) == ranks // 2
    for data_rank, passes in found:
        assert passes == seen[data_rank]
        assert passes[0] != passes[1]
    rows = [row[0] for passes in seen.values() for batch in passes[0] for row in batch]
    assert set(rows) == set(range(COUNT))


class ByRank(IterableDataset):
    """Wrong: takes its share by global rank."""

    def __iter__(self):
        for index in range(int(os.environ["RANK"]), COUNT, 2):
            yield {"x": torch.tensor(index)}


def read_by_rank():
    accelerator = fresh_accelerator(PP2, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    return list(accelerator.prepare(loader(ByRank())))


def test_different_batches_on_the_ranks_of_a_replica_are_found():
    with pytest.raises(RuntimeError, match=r"Batch 0 differs between the ranks of one replica \(0, 1\).*process_index"):
        on_ranks(read_by_rank, 2)


def train_unevenly(joined=None, **options):
    accelerator = fresh_accelerator(PP2, dataloader_config=DataLoaderConfiguration(**options))
    model = toy()
    model, optimizer, prepared = accelerator.prepare(model, adamw(model), DataLoader(Samples(20), batch_size=8))
    seen = []
    with accelerator.join_uneven_inputs([model], even_batches=joined):
        for batch in prepared:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            seen.append(len(batch["inputs"]))
    return seen


def uneven():
    return train_unevenly(joined=False)


def uneven_split():
    return train_unevenly(even_batches=False, split_batches=True)


def even_again():
    return train_unevenly(joined=True, even_batches=False)


@pytest.mark.parametrize("body", [uneven, uneven_split])
def test_training_with_uneven_batches_is_refused_before_the_first_step(body):
    with pytest.raises(RuntimeError, match=r"some of the 2 replicas get one batch more.*\(20 samples\)"):
        on_ranks(body, 4, timeout=60)


def evaluate_unevenly():
    accelerator = fresh_accelerator(PP2)
    model, prepared = accelerator.prepare(toy().eval(), DataLoader(Samples(20), batch_size=8))
    found = []
    with accelerator.join_uneven_inputs([model], even_batches=False), torch.no_grad():
        found += [model(batch["inputs"])["logits"] for batch in prepared]
    assert len(list(prepared)) == 2, "outside, batches are even again"
    return [len(logits) for logits in found]


def test_an_evaluation_may_be_uneven():
    assert on_ranks(evaluate_unevenly, 4) == [[8, 4], [8, 4], [8], [8]]


def test_nobody_has_to_be_joined_where_batches_are_even():
    assert on_ranks(uneven, 2) == [[8, 8, 4]] * 2
    assert on_ranks(even_again, 4) == [[8, 8]] * 4


# Training on what was read


def train(epochs=2):
    accelerator = accelerator_with({})
    set_seed(1)
    model = toy()
    model, optimizer, prepared = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Samples(), batch_size=8, shuffle=True)
    )
    losses = []
    for _ in range(epochs):
        for batch in prepared:
            batch["inputs"] = batch["inputs"] + 0.1 * torch.randn_like(batch["inputs"])  # noise of the script
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("processes", [1, 2])
def test_training_with_noise_goes_as_in_plain_accelerate(processes):
    expected = on_ranks(under, processes, None, train)[0]
    for found in on_ranks(under, 2 * processes, PP2, train):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# What else there is


def pickled():
    accelerator = fresh_accelerator(PP2)
    prepared = accelerator.prepare(loader(shuffle=True))
    twin = pickle.loads(pickle.dumps(prepared))
    before = list(prepared)
    again = pickle.loads(pickle.dumps(prepared))
    return len(before), len(list(twin)), len(list(again)), type(again) is type(prepared)


def test_a_prepared_loader_can_be_pickled():
    assert on_ranks(pickled, 2) == [(6, 6, 6, True)] * 2


def seed_worker(worker_id, num_workers, rank):
    random.seed(rank)


seed_worker.__module__ = "transformers.trainer_utils"


def worker_seeds():
    from functools import partial

    accelerator = fresh_accelerator(PP2)
    seed = partial(seed_worker, num_workers=1, rank=int(os.environ["RANK"]))
    return accelerator.prepare(loader(num_workers=1, worker_init_fn=seed)).worker_init_fn.keywords["rank"]


def test_the_trainers_workers_are_seeded_by_replica():
    assert on_ranks(worker_seeds, 4) == [0, 0, 1, 1]


def seeds():
    accelerator = fresh_accelerator(PP2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(9, device_specific=True)
    sampler = accelerator.prepare(loader(shuffle=True)).get_sampler()
    assert isinstance(sampler, SeedableRandomSampler)
    return sampler.initial_seed


def test_samplers_go_by_the_seed_of_the_main_process():
    assert on_ranks(seeds, 4) == [9] * 4


def share_of_batches():
    accelerator = fresh_accelerator(PP2)
    first = batches(1)[0]
    return mine(accelerator, first)["targets"].tolist(), first["targets"].tolist()


def test_the_checks_deal_out_as_loaders_do():
    found = on_ranks(share_of_batches, 4)
    assert found[0][0] + found[2][0] == found[0][1]
