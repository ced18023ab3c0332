"""Logits that are split along the vocabulary, where models, losses and metrics use them as if they were whole."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutput

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor
from smp_strategy.testing import run_ranks

BATCH, LENGTH, HIDDEN, VOCABULARY = 2, 7, 6, 13


def _shifted_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.CrossEntropyLoss(label_smoothing=0.1)(shifted.view(-1, shifted.size(-1)), wanted.view(-1))


LOSSES = {
    "causal": lambda logits, labels: ForCausalLMLoss(logits, labels, VOCABULARY),
    "causal, over all items": lambda logits, labels: ForCausalLMLoss(
        logits, labels, VOCABULARY, num_items_in_batch=torch.tensor(9)
    ),
    "masked": lambda logits, labels: ForMaskedLMLoss(logits, labels, VOCABULARY),
    "shifted by hand": _shifted_by_hand,
    "classes in the middle": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"),
    "of one token": lambda logits, labels: F.cross_entropy(logits[1, 0], labels[1, 1]),
    "none": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").sum(),
}
SLOWER = {
    "probabilities": lambda logits, labels: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(labels.clamp(0).flatten(), VOCABULARY).to(logits.dtype)
    ),
    "log-softmax": lambda logits, labels: F.nll_loss(
        logits.float().log_softmax(-1).flatten(0, 1), labels.flatten(), ignore_index=-100
    ),
    "z-loss": lambda logits, labels: (
        ForCausalLMLoss(logits, labels, VOCABULARY) + 1e-2 * logits.float().logsumexp(-1).square().mean()
    ),
}


def _run(loss: Any, dtype: torch.dtype, is_split: bool) -> tuple[Tensor, Tensor, int]:
    group = TensorGroup(dist.group.WORLD)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, :3] = -100
    logits = hidden @ weight.t()
    if is_split:
        logits = SplitTensor.from_whole(logits, group, -1)
    found = loss(logits, labels)
    sent = group.sent_bytes
    assert type(found) is Tensor
    found.backward()
    return found.detach(), hidden.grad, sent


def _differences(losses: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    found = {}
    for name, loss in losses.items():
        (one, gradient, _), (other, whole, _) = (_run(loss, dtype, is_split) for is_split in (True, False))
        assert one.dtype == other.dtype
        found[name] = max((one - other).abs().item(), (gradient - whole).abs().max().item())
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_losses_of_hugging_face_and_by_hand_are_those_of_whole_logits(
    size: int, dtype: torch.dtype, tolerance: float
) -> None:
    for found in run_ranks(_differences, size, LOSSES | SLOWER if dtype == torch.float32 else LOSSES, dtype):
        assert {name: difference for name, difference in found.items() if not difference <= tolerance} == {}


def _sent() -> dict[str, int]:
    return {name: _run(loss, torch.float32, is_split=True)[2] for name, loss in LOSSES.items()}


def test_losses_send_two_numbers_of_each_token_or_three_and_never_logits() -> None:
    tokens = BATCH * LENGTH
    for sent in run_ranks(_sent, 2):
        assert sent.pop("shifted by hand") == 3 * 4 * (tokens - BATCH)
        assert sent.pop("of one token") == 2 * 4
        assert set(sent.values()) == {2 * 4 * tokens}


def _outputs() -> list[bool]:
    group = TensorGroup(dist.group.WORLD)
    whole = torch.randn(BATCH, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    part = SplitTensor.from_whole(whole.requires_grad_(), group, -1)
    output = CausalLMOutput(loss=torch.zeros(()), logits=part * 1)
    before = group.sent_bytes
    predicted = output.logits.argmax(-1)
    sent = group.sent_bytes - before
    collected = torch.cat([output.logits.detach().cpu(), output[1].detach().cpu()])
    return [
        str(whole.detach()) in str(output.logits.detach()),
        "tensor(" in repr(output),
        torch.equal(predicted, whole.argmax(-1)),
        sent == 2 * 8 * BATCH * LENGTH,
        torch.equal((predicted == labels).float().mean(), (whole.argmax(-1) == labels).float().mean()),
        torch.equal(collected[BATCH:], whole),
        torch.equal(output.logits.softmax(-1), whole.softmax(-1)),
        torch.equal(output.logits.topk(3, -1).indices, whole.topk(3, -1).indices),
        torch.equal(output.logits.max(-1).values, whole.max(-1).values),
        torch.equal(dataclasses.asdict(CausalLMOutput(logits=part.detach()))["logits"], whole),
        torch.equal(output.logits[torch.arange(BATCH), torch.tensor([3, 5])], whole[[0, 1], [3, 5]]),
        output.logits.shape == whole.shape and output.logits.size(-1) == VOCABULARY and output.logits.ndim == 3,
    ]


def test_outputs_of_models_with_split_logits_serve_metrics_and_collections() -> None:
    for found in run_ranks(_outputs, 2):
        assert [number for number, is_right in enumerate(found) if not is_right] == []


def _measured() -> list[tuple[float, float]]:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
    from torchmetrics.text import Perplexity

    group = TensorGroup(dist.group.WORLD)
    whole = torch.randn(BATCH, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    found = []
    for made, flat in (
        (lambda: Perplexity(sync_on_compute=False), False),
        (lambda: MulticlassAccuracy(VOCABULARY, sync_on_compute=False), True),
        (lambda: MulticlassAccuracy(VOCABULARY, top_k=3, sync_on_compute=False), True),
        (lambda: MulticlassAUROC(VOCABULARY, sync_on_compute=False), True),
    ):
        values = []
        for logits in (SplitTensor.from_whole(whole, group, -1), whole):
            metric = made()
            for _ in range(2):
                metric.update(*(each.flatten(0, 1) if flat else each for each in (logits, labels)))
            values.append(float(metric.compute()))
        found.append(tuple(values))
    return found


@pytest.mark.filterwarnings("ignore")
def test_metrics_of_torchmetrics_are_those_of_whole_logits() -> None:
    for found in run_ranks(_measured, 2):
        for one, other in found:
            assert one == pytest.approx(other, rel=1e-5)


def _predicted() -> tuple[list[Any], int]:
    group = TensorGroup(dist.group.WORLD)
    with FakeTensorMode():
        hidden = torch.randn(BATCH, LENGTH, 5, requires_grad=True)
        logits = SplitTensor.from_part(hidden * 2, group, -1, [5, 5])
        labels = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        loss = ForCausalLMLoss(logits, labels, 10)
        loss.backward()
        found = [tuple(each.shape) for each in (logits, logits.argmax(-1), logits.softmax(-1), loss, hidden.grad)]
    return found, group.sent_bytes


def test_shapes_are_predicted_without_values_and_without_messages() -> None:
    expected = [(BATCH, LENGTH, 10), (BATCH, LENGTH), (BATCH, LENGTH, 10), (), (BATCH, LENGTH, 5)]
    assert run_ranks(_predicted, 2) == [(expected, 0)] * 2


def _under_autocast() -> list[float]:
    found = []
    for is_split in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss, gradient, _ = _run(LOSSES["none"], torch.bfloat16, is_split)
        found.append((loss.double(), gradient.double(), str(loss.dtype)))
    (one, gradient, dtype), (other, whole, dtype_too) = found
    assert dtype == dtype_too, (dtype, dtype_too)
    return [((one - other) / other).abs().item(), (gradient - whole).abs().max().item()]


def test_autocast_computes_the_loss_in_the_dtype_in_which_torch_does() -> None:
    for differences in run_ranks(_under_autocast, 2):
        assert max(differences) < 0.05
