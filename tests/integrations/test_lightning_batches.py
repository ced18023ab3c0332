"""Batches of every shape, and whatever steps return and log of them, are what one process makes of them."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_toy import CLASSES, FEATURES, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from test_lightning_outputs import assert_same, compare, smp
from test_sample_comparisons_doors import heard
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from smp_strategy.errors import UnsupportedError


class Items(Dataset):
    """Samples of a kind, 11 of them: the last batch is smaller."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return self.sample(index, torch.Generator().manual_seed(index))


def named(index, generator):
    return {"x": torch.randn(FEATURES, generator=generator), "meta": {"weight": f"{index}", "kind": ("a", f"{index}")}}


def sequence(index, generator):
    return torch.randn(3, FEATURES, generator=generator)  # steps of a sequence


def of_lengths(index, generator):
    return torch.randn(1 + index % 3, FEATURES, generator=generator)


def detected(index, generator):
    return of_lengths(index, generator), {"label": torch.tensor(index % CLASSES), "boxes": torch.ones(index % 4, 4)}


def named_step(self, batch, batch_idx):
    first, weights = batch["meta"]["kind"][1], torch.tensor([float(text) for text in batch["meta"]["weight"]])
    assert len(first) == len(weights) == len(batch["x"])
    return (self.net(batch["x"]).mean(1) * weights).mean()


def sequences_step(self, batch, batch_idx):
    return torch.stack([self.net(each).mean(0).square().mean() for each in batch]).mean()


def detection_step(self, batch, batch_idx):
    losses = [
        nn.functional.cross_entropy(self.net(image).mean(0), target["label"]) * (1 + len(target["boxes"]))
        for image, target in zip(*batch, strict=True)
    ]
    return torch.stack(losses).mean()


def masks_step(self, batch, batch_idx):
    assert len(batch["masks"]) == len(batch["x"])
    weights = torch.tensor([float(len(mask)) for mask in batch["masks"]])
    return (self.net(batch["x"]).mean(1) * weights).mean()


def packed_step(self, batch, batch_idx):
    _, (hidden, _) = self.rnn(batch)
    return self.net(hidden[-1]).square().mean()


def with_masks(samples):
    return {"masks": samples, "x": torch.stack([each[0] for each in samples])}


KINDS = {
    "nested strings": (named, named_step, None),
    "sequences": (sequence, sequences_step, lambda samples: samples),
    "tuples of sequences": (sequence, sequences_step, tuple),
    "images of sizes of their own": (of_lengths, sequences_step, lambda samples: samples),
    "detection": (detected, detection_step, lambda samples: tuple(zip(*samples, strict=True))),
    "masks": (of_lengths, masks_step, with_masks),
    "packed": (of_lengths, packed_step, lambda samples: pack_sequence(samples, enforce_sorted=False)),
}


def trained(folder, smp_options, name, workers=0):
    sample, step, collate = KINDS[name]
    module = toy_module(training_step=step, on_train_batch_start=lambda self, batch, batch_idx: None)
    if name == "packed":
        module.rnn = nn.LSTM(FEATURES, FEATURES)
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    trainer.fit(module, DataLoader(Items(sample), batch_size=4, collate_fn=collate, num_workers=workers))
    return module.state_dict()


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_every_sample_is_trained_on_with_what_belongs_to_it(name, pp, tmp_path):
    compare(trained, pp, tmp_path, name)


def test_workers_say_how_many_samples_they_have_read(tmp_path):
    compare(trained, 2, tmp_path, "sequences", 2)


def counted(folder, smp_options):
    seen = []

    def step(self, batch, batch_idx):
        logits = self.net(batch[0])
        right = (logits.argmax(-1) == batch[1]).sum()
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log_dict({"right": right, "size": len(batch[0]), "float": float(len(batch[0]))}, reduce_fx="sum")
        self.log("largest", len(batch[0]), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("number", batch_idx, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("rate", 0.125, on_step=True, on_epoch=True)
        self.log("mean", right / len(batch[0]), on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return {"loss": loss, "right": right, "size": len(batch[0]), "index": batch_idx, "deep": [{"n": right.item()}]}

    def note(self, outputs, batch, batch_idx):
        seen.append([outputs["right"].item(), outputs["size"], outputs["index"], outputs["deep"]])

    def validate(self, batch, batch_idx):
        return step(self, batch, batch_idx)

    module = toy_module(
        training_step=step, validation_step=validate, on_train_batch_end=note, on_validation_batch_end=note
    )
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    loader = toy_loader(shuffle=False, batch_size=10)
    trainer.fit(module, loader, loader)
    metrics = metrics_of(trainer)
    metrics.pop("largest")  # of microbatches, where a step counts its own
    return seen, metrics


@pytest.mark.parametrize("pp", [2, 4])
def test_counts_are_those_of_the_whole_batch(pp, tmp_path):
    compare(counted, pp, tmp_path)


def vague(folder, smp_options, where, use):
    def step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return {"loss": logits.square().mean(), "by_class": torch.bincount(batch[1], minlength=CLASSES + 1)}

    def note(self, outputs, batch, batch_idx):
        if use:
            outputs["by_class"] + 1

    overrides = {"training_step": step, "predict_step": step, "on_train_batch_end": note}
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    getattr(trainer, where)(toy_module(**overrides), toy_loader(shuffle=False))
    return True


def test_what_can_be_joined_in_several_ways_is_refused_where_it_is_used(tmp_path):
    assert on_ranks(vague, 2, tmp_path, smp(2), "fit", False) == [True, True]
    for where in ("fit", "predict"):
        options = smp(2, evaluation_microbatches=2) if where == "predict" else smp(2)
        with pytest.raises(
            RuntimeError, match=rf"{UnsupportedError.__name__}.*\['by_class'\].*no dim of it stands for"
        ):
            on_ranks(vague, 2, tmp_path, options, where, True)


def with_fewer(folder, smp_options):
    module = toy_module()
    reports = []
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    with pytest.warns(UserWarning, match="`microbatches` is 16, but .* 8 will be run.*at least 16 samples"):
        trainer.fit(module, toy_loader(shuffle=False, batch_size=8))
    reports.append(str(trainer.strategy.explain()))
    return reports


def test_fewer_microbatches_than_asked_for_are_told(tmp_path):
    for [report] in on_ranks(with_fewer, 2, tmp_path, smp(2, microbatches=16)):
        assert "with 8 microbatches" in report


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


def as_pair(samples):
    x, y = (torch.stack(each) for each in zip(*samples, strict=True))
    return Pair(x, y, [f"sample {number}" for number in range(len(x))])


def twice(folder, smp_options):
    """A later run meets the dataclass when it is known already."""
    losses = []

    def step(self, batch, batch_idx):
        assert len(batch.names) == len(copy.deepcopy(batch).x)
        return nn.functional.cross_entropy(self.net(batch.x), batch.y)

    def validate(self, batch, batch_idx):
        losses.append(step(self, batch, batch_idx).item())

    steps = {"training_step": step, "validation_step": validate}
    module = toy_module(**steps, on_train_batch_start=lambda self, batch, batch_idx: None)
    loader = DataLoader(toy_loader(shuffle=False).dataset, batch_size=4, collate_fn=as_pair)
    toy_trainer(folder, smp=smp_options, max_epochs=1).fit(module, loader)
    toy_trainer(folder, smp=smp_options).validate(module, loader, verbose=False)
    return [sum(losses) / len(losses)], module.state_dict()


@pytest.mark.parametrize("options", [smp(2), {"tensor_parallel_degree": 2}], ids=["pp2", "tp2"])
def test_dataclasses_are_copied_in_later_runs_too(options, tmp_path):
    with quiet():
        [(expected, weights)] = on_ranks(twice, 1, tmp_path / "one", None)
    for found, theirs in on_ranks(twice, 2, tmp_path / "smp", options):
        assert found == pytest.approx(expected, rel=1e-4)
        for name, tensor in theirs.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


def of_two_loaders(folder, smp_options, sizes):
    def step(self, batch, batch_idx):
        (x, y), (weak, strong) = batch["labelled"], batch["unlabelled"]
        gap = (self.net(weak) - self.net(strong)).square().mean()
        return nn.functional.cross_entropy(self.net(x), y) + gap

    def views(samples):
        x = torch.stack([sample[0] for sample in samples])
        return [x, x * 1.1]

    data = toy_loader(shuffle=False).dataset
    loaders = {
        "labelled": DataLoader(data, batch_size=sizes[0]),
        "unlabelled": DataLoader(data, batch_size=sizes[1], collate_fn=views),
    }
    module = toy_module(training_step=step, on_train_batch_start=lambda self, batch, batch_idx: None)
    toy_trainer(folder, smp=smp_options, max_steps=3).fit(module, CombinedLoader(loaders, "min_size"))
    return module.state_dict()


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 8)])
def test_loaders_with_batches_of_different_sizes_are_refused(sizes, tmp_path):
    with pytest.raises(RuntimeError, match=rf"batches of {sizes[0]} and {sizes[1]} samples, by several data loaders"):
        on_ranks(of_two_loaders, 2, tmp_path, smp(2), sizes)


def test_loaders_with_batches_of_one_size_are_cut(tmp_path):
    compare(of_two_loaders, 2, tmp_path, (4, 4))


class Graphs:
    """Nodes of all samples, with the sample of each."""

    def __init__(self, samples):
        self.nodes, self.sample = torch.cat(samples), torch.arange(len(samples)).repeat_interleave(3)


def of_objects(folder, smp_options):
    def step(self, batch, batch_idx):
        graphs, targets = batch
        scores = torch.zeros(len(targets), CLASSES).index_add(0, graphs.sample, self.net(graphs.nodes))
        return nn.functional.cross_entropy(scores, targets)

    def collate(samples):
        return Graphs(samples), torch.arange(len(samples)) % CLASSES

    module = toy_module(training_step=step, on_train_batch_start=lambda self, batch, batch_idx: None)
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    trainer.fit(module, DataLoader(Items(sequence), batch_size=4, collate_fn=collate))
    return module.state_dict()


UNCUT = {"objects": of_objects, "two loaders": partial(of_two_loaders, sizes=(2, 4))}


def uncut(folder, smp_options, name):
    with heard() as text:
        weights = UNCUT[name](folder, smp_options)
    return weights, text.getvalue()


@pytest.mark.parametrize("name", UNCUT)
def test_batches_that_cannot_be_cut_run_whole_if_nobody_has_asked_for_microbatches(name, tmp_path):
    with quiet():
        expected = UNCUT[name](tmp_path / "one", None)
    found = on_ranks(uncut, 2, tmp_path / "smp", {"pipeline_parallel_degree": 2}, name)
    for weights, _ in found:
        assert_same(weights, expected)
    text = found[0][1]
    assert text.count("Batches are not cut into microbatches, and stages do not overlap. The batch ") == 1
    assert "What would help most: `microbatches=" not in text


def test_objects_beside_tensors_are_refused_if_microbatches_are_given(tmp_path):
    with pytest.raises(RuntimeError, match=r"`batch\[0\]` \(Graphs\) is an object that holds tensors of its 4 samples"):
        on_ranks(of_objects, 2, tmp_path, smp(2))


@dataclass
class Noted:
    """A batch of a user's own class."""

    inputs: torch.Tensor
    targets: torch.Tensor
    note: str = "a note"


FORMS = {
    "dict": lambda samples: dict(zip(("inputs", "targets"), default_collate(samples), strict=True)),
    "list": lambda samples: [*default_collate(samples), "a note"],
    "object": lambda samples: Noted(*default_collate(samples)),
}


def changed(folder, smp_options, form):
    """What a hook finds in the batch that the step has changed."""
    found = []

    def step(self, batch, batch_idx):
        inputs, targets = (batch[0], batch[1]) if form == "list" else items(batch)[:2]
        features = self.net[:2](inputs)
        logits = self.net[2:](features)
        if form == "list":
            batch[1] = logits.detach()
            batch.pop()
        else:
            place = batch if form == "dict" else vars(batch)
            place["features"], place["size"] = features.detach(), len(targets)
            place["targets"] = logits.argmax(-1)
            place.pop("note", None)
        return nn.functional.cross_entropy(logits, targets)

    def items(batch):
        return list(batch.values()) if form == "dict" else list(batch) if form == "list" else list(vars(batch).values())

    def note(self, outputs, batch, *args):
        found.append([item.clone() if isinstance(item, torch.Tensor) else item for item in items(batch)])

    hooks = {"on_train_batch_end": note, "on_validation_batch_end": note, "on_train_batch_start": lambda self, *_: None}
    module = toy_module(training_step=step, validation_step=step, **hooks)
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1, use_distributed_sampler=False)
    loader = toy_loader(shuffle=False, collate_fn=FORMS[form])
    trainer.fit(module, loader, loader)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pp", [2, 4])
def test_hooks_get_the_batch_as_the_step_has_left_it(pp, form, tmp_path):
    with quiet():
        expected = changed(tmp_path / "one", None, form)
    for found in on_ranks(changed, pp, tmp_path / "smp", smp(pp), form):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
