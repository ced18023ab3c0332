"""The loss of a batch is that of the whole batch, also where its means are over different numbers of elements."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, unpad_sequence

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.join_results import merge
from smp_strategy.testing import run_ranks

FEATURES, CLASSES, LENGTH = 8, 5, 6
Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("class_weights", torch.tensor([0.1, 1.0, 2.0, 0.5, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def batch_of(samples: int = 8) -> Batch:
    """Sequences of very different lengths; the second quarter of the samples has no label at all."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, LENGTH, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (samples, LENGTH), generator=generator)
    lengths = torch.tensor([6, 1, 0, 0, 2, 6, 3, 1])[torch.arange(samples) % 8]
    mask = torch.arange(LENGTH) < lengths[:, None]
    y = torch.randn(samples, LENGTH, CLASSES, generator=generator)
    return {"x": x, "labels": labels.masked_fill(~mask, -100), "mask": mask, "y": y, "lengths": lengths}


def flat(out: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return out.reshape(-1, CLASSES), labels.reshape(-1)


def ignored(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(*flat(net(batch["x"]), batch["labels"]))


def shifted(net: Net, batch: Batch) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(net(batch["x"]).float().view(-1, CLASSES), labels.view(-1), ignore_index=-100)


def class_weights(net: Net, batch: Batch) -> Tensor:
    out, labels = flat(net(batch["x"]), batch["labels"])
    return nn.CrossEntropyLoss(weight=net.class_weights)(out, labels)


def smoothed(net: Net, batch: Batch) -> Tensor:
    out, labels = flat(net(batch["x"]), batch["labels"])
    return F.cross_entropy(out, labels, net.class_weights, label_smoothing=0.1)


def negative_log(net: Net, batch: Batch) -> Tensor:
    labels = batch["labels"].clone()
    labels[labels == -100] = 0
    return F.nll_loss(net(batch["x"]).log_softmax(-1).transpose(1, 2), labels, ignore_index=0)


def changed_in_place(net: Net, batch: Batch) -> Tensor:
    labels = batch["labels"]
    labels += 1  # not the same if it is done twice
    labels[labels == 1] = -99
    return F.cross_entropy(net(batch["x"]).transpose(1, 2), labels.clamp(max=CLASSES - 1), ignore_index=-99)


def masked_mean(net: Net, batch: Batch) -> Tensor:
    losses, mask = (net(batch["x"]) - batch["y"]).square().mean(-1), batch["mask"].float()
    return (losses * mask).sum() / mask.sum()


def at_least_one(net: Net, batch: Batch) -> Tensor:
    losses, mask = (net(batch["x"]) - batch["y"]).square(), batch["mask"]
    return (losses * mask[..., None]).sum() / (mask.sum().clamp(min=1) * CLASSES + 1e-6)


def number_read(net: Net, batch: Batch) -> Tensor:
    losses = (net(batch["x"]) - batch["y"]).abs().mean(-1)
    return losses.masked_fill(~batch["mask"], 0.0).sum() / max(batch["mask"].sum().item(), 1)


def normalized_weights(net: Net, batch: Batch) -> Tensor:
    weights = batch["mask"] / batch["mask"].sum()
    return ((net(batch["x"]) - batch["y"]).square().mean(-1) * weights).sum()


def products_with_weights(net: Net, batch: Batch) -> Tensor:
    losses = (net(batch["x"]) - batch["y"]).square().mean(-1).flatten()
    weights = batch["mask"].float().flatten() / batch["mask"].sum()
    return torch.dot(losses, weights) + weights @ losses.sqrt() + losses.sin() @ weights


def reciprocal(net: Net, batch: Batch) -> Tensor:
    losses = F.cross_entropy(*flat(net(batch["x"]), batch["labels"]), reduction="sum")
    losses *= 1 / batch["lengths"].sum()
    return losses


def means_of_both(net: Net, batch: Batch) -> Tensor:
    losses, mask = (net(batch["x"]) - batch["y"]).square().mean(-1), batch["mask"].float()
    return (losses * mask).mean() / mask.mean()


def selected(net: Net, batch: Batch) -> Tensor:
    return (net(batch["x"]) - batch["y"]).square()[batch["mask"]].mean()


def both_selected(net: Net, batch: Batch) -> Tensor:
    mask = batch["lengths"] > 1
    return F.mse_loss(net(batch["x"])[mask].sin(), batch["y"][mask])


def labels_selected(net: Net, batch: Batch) -> Tensor:
    mask = batch["mask"]
    return F.cross_entropy(net(batch["x"])[mask], batch["labels"][mask])


def indices(net: Net, batch: Batch) -> Tensor:
    found = batch["mask"].view(-1).nonzero().squeeze(1)
    return F.smooth_l1_loss(net(batch["x"]).view(-1, CLASSES)[found], batch["y"].view(-1, CLASSES)[found])


def two_terms(net: Net, batch: Batch) -> Tensor:
    out = net(batch["x"])
    positive = (batch["labels"] > 2).float()
    second = (out.square().mean(-1) * positive).sum() / positive.sum()
    return F.cross_entropy(*flat(out, batch["labels"])) + 0.5 * second + 0.1 * out.abs().mean()


def per_step(net: Net, batch: Batch) -> Tensor:
    out, total = net(batch["x"]), 0.0
    for place in range(LENGTH - 3):
        total = total + F.cross_entropy(out[:, place], batch["labels"][:, place])
    return total / 3


def per_sample(net: Net, batch: Batch) -> Tensor:
    """Of each sample its own mean, of all with the same weight."""
    out, mask = net(batch["x"]), batch["mask"]
    parts = [(row.square().mean(-1) * own).sum() / own.sum().clamp(min=1) for row, own in zip(out, mask, strict=True)]
    each = (out.square().mean(-1) * mask).sum(1) / mask.sum(1).clamp(min=1)
    return torch.stack(parts).mean() + each.mean()


def per_token(net: Net, batch: Batch) -> Tensor:
    return (net(batch["x"]) - batch["y"]).square().mean(-1)


def lengths_of(batch: Batch) -> list[int]:
    return batch["lengths"].clamp(min=1).tolist()


def read_as_int(net: Net, batch: Batch) -> Tensor:
    return (per_token(net, batch) * batch["mask"]).sum() / int(batch["lengths"].sum())


def rows_of_own_lengths(net: Net, batch: Batch) -> Tensor:
    """Of each sample its own mean, which a loop takes in several ways."""
    out, losses, lengths = net(batch["x"]), per_token(net, batch), lengths_of(batch)
    means = torch.stack([losses[i, :length].mean() for i, length in enumerate(lengths)]).mean()
    total = sum(losses[i, :length].sum() / length for i, length in enumerate(lengths))
    for row, y, length in zip(out, batch["y"], lengths, strict=True):
        total = total + F.mse_loss(row[:length], y[:length]) * 0.5
    parts = [net(batch["x"][i, :length]).square().mean() for i, length in enumerate(lengths)]
    return means + (total + sum(parts)) / len(losses)


LOSSES = (
    *(ignored, shifted, class_weights, smoothed, negative_log, changed_in_place, masked_mean, at_least_one),
    *(number_read, normalized_weights, products_with_weights, reciprocal, means_of_both, selected, both_selected),
    *(labels_selected, indices, two_terms, per_step, per_sample, read_as_int, rows_of_own_lengths),
)
SOME = (ignored, changed_in_place, selected, two_terms)


def whole(loss: Callable[[Net, Batch], Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    net = Net()
    found = loss(net, {name: value.clone() for name, value in batch.items()})
    found.backward()
    return found.detach(), {name: each.grad for name, each in net.named_parameters() if each.grad is not None}


def run_one(loss: Callable[[Net, Batch], Tensor], samples: int, options: dict[str, Any]) -> Any:
    net, reports = Net(), list[str]()
    engine = Engine(SMPConfig(**options), report=reports.append)
    engine.attach(net)

    def step(batch: Batch) -> Tensor:
        return loss(net, batch)

    trained = engine.train_step(step, batch_of(samples), loss_of=lambda result: result)
    with torch.no_grad():
        evaluated = engine.eval_step(step, batch_of(samples))
    mean = merge(evaluated.outputs, evaluated.sizes)
    trained.commit(torch.ones(()), reduce=True)
    gradients = engine.run_hook(lambda: {name: each.grad.clone() for name, each in net.named_parameters()})
    engine.close()
    return trained.loss, mean, gradients, [each for each in reports if "weighted by samples, where" in each]


def run(losses: Sequence[Callable[[Net, Batch], Tensor]], samples: int, options: dict[str, Any]) -> list[Any]:
    return [run_one(loss, samples, options) for loss in losses]


def check(losses: Sequence[Callable[[Net, Batch], Tensor]], ranks: int, samples: int, options: dict[str, Any]) -> None:
    expected = [whole(loss, batch_of(samples)) for loss in losses]
    results = run_ranks(run, ranks, losses, samples, options)
    for loss, (value, gradients), *found in zip(losses, expected, *results, strict=True):
        for mine, evaluated, own, reports in found:
            assert torch.allclose(mine, value, rtol=1e-6), (loss.__name__, mine, value)
            assert torch.allclose(evaluated, value, rtol=1e-6), (loss.__name__, evaluated, value)
            assert not reports, loss.__name__
            torch.testing.assert_close(own, gradients, rtol=1e-5, atol=1e-7)


def test_losses_and_gradients_are_those_of_the_whole_batch():
    check(LOSSES, 2, 8, {"pipeline_parallel_degree": 2, "microbatches": 4})


LAYOUTS = {
    "uneven microbatches": (2, 7, {"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": "1f1b"}),
    "stages of shards": (4, 8, {"pipeline_parallel_degree": 2, "microbatches": 4, "sharded_data_parallel_degree": 2}),
    "two chunks": (2, 8, {"pipeline_parallel_degree": 2, "microbatches": 8, "virtual_pipeline_degree": 2}),
    "one rank": (1, 8, {"pipeline_parallel_degree": 1, "microbatches": 4}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_in_every_layout(layout):
    check(SOME, *LAYOUTS[layout])


# Counts that are not known beforehand


def by_confidence(net: Net, batch: Batch) -> Tensor:
    losses = net(batch["x"]).square().mean(-1)
    return losses[losses > 0.2].mean()


def random_mask(net: Net, batch: Batch) -> Tensor:
    mask = torch.rand(batch["labels"].shape) < 0.5
    return (net(batch["x"]).square().mean(-1) * mask).sum() / (mask * batch["mask"]).sum().clamp(min=1)


def labels_from_outside(net: Net, batch: Batch) -> Tensor:
    labels = torch.tensor(batch["labels"].clamp(min=-1).tolist())
    return F.cross_entropy(net(batch["x"]).transpose(1, 2), labels, ignore_index=-1)


def without_nan(net: Net, batch: Batch) -> Tensor:
    losses = net(batch["x"]).square().mean(-1)
    return torch.where(batch["mask"], losses, torch.nan).nanmean()


def plain_mean(net: Net, batch: Batch) -> Tensor:
    return F.mse_loss(net(batch["x"]), batch["y"])


# Counts in shapes and numbers that nothing of the batch tells


def number_of_places(net: Net, batch: Batch) -> Tensor:
    return (per_token(net, batch) * batch["mask"]).sum() / max(len(batch["mask"].nonzero()), 1)


def size_of_labels(net: Net, batch: Batch) -> Tensor:
    return (per_token(net, batch) * batch["mask"]).sum() * (1 / max(batch["labels"][batch["mask"]].shape[0], 1))


def counted_by_numpy(net: Net, batch: Batch) -> Tensor:
    return (per_token(net, batch) * batch["mask"]).sum() / torch.tensor(max(float(batch["mask"].numpy().sum()), 1.0))


def packed(net: Net, batch: Batch) -> Tensor:
    out, y = (
        pack_padded_sequence(each, torch.tensor(lengths_of(batch)), batch_first=True, enforce_sorted=False).data
        for each in (net(batch["x"]), batch["y"])
    )
    return F.mse_loss(out, y)


def cut_and_joined(net: Net, batch: Batch) -> Tensor:
    out, lengths = net(batch["x"]), lengths_of(batch)
    rows = (torch.cat([each[i, :length] for i, length in enumerate(lengths)]) for each in (out, batch["y"]))
    return F.mse_loss(*rows)


def unpadded(net: Net, batch: Batch) -> Tensor:
    return torch.cat(unpad_sequence(net(batch["x"]), batch["lengths"].clamp(min=1), batch_first=True)).square().mean()


def sum_of_rows(net: Net, batch: Batch) -> Tensor:
    losses, lengths = per_token(net, batch), lengths_of(batch)
    rows = [losses[i, :length].sum() for i, length in enumerate(lengths)]
    return torch.stack(rows).sum() / sum(lengths)


def trimmed(net: Net, batch: Batch) -> Tensor:
    longest = max(int(batch["lengths"].max()), 1)
    return F.mse_loss(net(batch["x"][:, :longest]), batch["y"][:, :longest])


UNKNOWN = (
    *(number_of_places, size_of_labels, counted_by_numpy, packed, cut_and_joined, unpadded, sum_of_rows),
    trimmed,
)


def test_a_count_that_nothing_tells_is_told_of_by_its_line():
    options = {"pipeline_parallel_degree": 2, "microbatches": 4}
    for found in run_ranks(run, 2, UNKNOWN, 8, options):
        for loss, (_, _, _, reports) in zip(UNKNOWN, found, strict=True):
            assert len(reports) == 1, loss.__name__
            assert "test_whole_batch_loss.py" in reports[0], loss.__name__
            assert "its count is another one in each microbatch" in reports[0], loss.__name__


def run_reports(options: dict[str, Any]) -> list[list[str]]:
    losses = (by_confidence, random_mask, labels_from_outside, without_nan, plain_mean)
    options = {"pipeline_parallel_degree": 2, "microbatches": 2, **options}
    return [run_one(loss, 2, options)[3] for loss in losses]


def test_a_count_that_is_not_known_beforehand_is_told_of_once():
    for reports in run_ranks(run_reports, 2, {}):
        assert [len(each) for each in reports] == [1, 1, 1, 1, 0]
        assert "test_whole_batch_loss.py" in reports[0][0]
        assert "selected by values of the model" in reports[0][0]


def test_losses_are_weighted_by_samples_if_that_is_asked_for():
    options = {"pipeline_parallel_degree": 2, "microbatches": 4, "loss_weighting": "samples"}
    found = run_ranks(run_one, 2, ignored, 8, options)[0]
    parts = [whole(ignored, {name: value[rows] for name, value in batch_of().items()})[0] for rows in QUARTERS]
    assert found[0].isnan()
    assert parts[1].isnan()


QUARTERS = [slice(start, start + 2) for start in range(0, 8, 2)]
