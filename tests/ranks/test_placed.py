"""What a step may do with tensors that live on another stage."""

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.errors import PeerFailedError, UnsupportedError
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

from .step_runs import MICROBATCHES, alone, assert_as_alone, engine_for, train
from .steps import STEPS, UNITS, Block, Drawing, Net, batch, change_after_sending, draws, one_after_the_other


@pytest.mark.parametrize("options", [{}, {"skip_tracing": True}], ids=["traced", "untraced"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_numbers_of_one_process(name, options):
    assert_as_alone(alone(STEPS[name], Block), run_ranks(train, 2, STEPS[name], Block, 2, options))


@pytest.mark.parametrize("name", UNITS)
def test_units_may_take_and_return_any_nest(name):
    assert_as_alone(alone(*UNITS[name]), run_ranks(train, 2, *UNITS[name], 2, {}))


@pytest.mark.parametrize("block", [Block, Drawing], ids=["glue", "units"])
def test_random_numbers_are_the_same_on_any_number_of_stages(block):
    (expected,) = run_ranks(train, 1, draws, block, 1, {})
    for pp in (2, 4):
        assert_as_alone(expected, run_ranks(train, pp, draws, block, pp, {}))


def refusal(body: Any, pp: int = 2, **options: Any) -> str:
    """Message of the UnsupportedError that ``body(net, x)`` meets, the same on every rank that gets that far."""

    def run() -> str:
        torch.manual_seed(0)
        net = Net(body)
        engine = engine_for(net, pp, **options)
        try:
            engine.train_step(net.loss, batch(), loss_of=lambda loss: loss)
        except UnsupportedError as error:
            return str(error)
        except PeerFailedError:
            return ""
        return "not refused"

    messages = [message for message in run_ranks(run, pp) if message]
    assert len(set(messages)) == 1, messages
    return messages[0]


def body_of(use: Any) -> Any:
    def body(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x))
        use(net, h, x)
        return d(c(h)).pow(2).mean()

    return body


REFUSED: dict[str, tuple[Any, str]] = {
    "backward": (lambda net, h, x: h.sum().backward(), "`backward` of a placed tensor.*Return the loss"),
    "grad": (lambda net, h, x: torch.autograd.grad(h.sum(), net.offset), "the gradient of a parameter of shape"),
    "data": (lambda net, h, x: setattr(h, "data", x), "`data` of a placed tensor"),
    "plain in place": (lambda net, h, x: x.add_(h), "`add_` changes a tensor in place that exists on every stage"),
    "plain item": (lambda net, h, x: x.__setitem__((slice(None), 0), h[:, 0]), "in place that exists on every stage"),
    "resize": (lambda net, h, x: h.resize_(1), "`resize_`"),
    "changed weights": (
        lambda net, h, x: torch.no_grad()(net.blocks[3].norm.weight.mul_)(0.5),
        r"changes blocks.3.norm.weight in place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_placed_is_refused_with_the_reason(name):
    use, message = REFUSED[name]
    found = refusal(body_of(use))
    assert re.search(message, found, re.DOTALL), found


def stale_results() -> Any:
    torch.manual_seed(0)
    net = Net(None)

    def step(part: Any) -> dict[str, Tensor]:
        x = part["x"]
        a, b, c, d = net.blocks
        h = a(x) * 1
        row = h[0]
        row += d(c(b(x))).mean(0)
        return {"loss": row.pow(2).mean(), "h": h.detach(), "base": h, "empty": h[:0]}

    if dist.is_initialized():
        engine = engine_for(net)
        run = engine.train_step(step, batch(), loss_of=lambda found: found["loss"])
        return [{name: found[name].detach().clone() for name in ("h", "base", "empty")} for found in run.outputs]
    return [{name: value.detach() for name, value in step(part).items()} for part in split(batch(), MICROBATCHES)[0]]


def test_results_have_the_changes_that_were_made_through_views():
    expected = stale_results()
    for found in run_ranks(stale_results, 2):
        for mine, plain in zip(found, expected, strict=True):
            for name, value in mine.items():
                assert torch.equal(value, plain[name]), name


def test_a_change_that_cannot_reach_a_tensor_on_another_stage_is_refused():
    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x)) * 1
        with torch.no_grad():
            h.detach().mul_(d(c(h)))  # happens on the other stage, and autograd must not see it
        return h.pow(2).mean()

    assert "shares its memory with one that was changed in place on stage 1" in refusal(step)


def test_a_view_that_was_sent_before_its_base_changed_is_sent_again():
    assert_as_alone(alone(change_after_sending, Block), run_ranks(train, 2, change_after_sending, Block, 2, {}))


class Counting(Block):
    """Returns another constant each time."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x), self.calls


def test_a_unit_that_returns_other_constants_than_predicted_is_refused():
    def step(net: Net, x: Tensor) -> Tensor:
        total = 0
        for block in net.blocks:
            x, calls = block(x)
            total += calls
        return x.pow(2).mean() * total

    with pytest.raises(RuntimeError, match=r"UnsupportedError: `blocks\.\d` returned .* where its dry run returned"):
        run_ranks(train, 2, step, Counting, 2, {})


class Hidden:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TakesObject(Block):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x.tensor)


def test_a_placed_tensor_inside_of_an_object_is_refused_by_units():
    def step(net: Net, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(Hidden(x))
        return x.pow(2).mean()

    with pytest.raises(RuntimeError, match=r"UnsupportedError: .* inside a unit \(TakesObject\) meets a placed tensor"):
        run_ranks(train, 2, step, TakesObject, 2, {})


class Several(list[Tensor]):
    """A list to PyTorch, but not to its trees of values."""


def test_lists_may_have_classes_of_their_own():
    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x))
        return torch.cat(Several([h, d(c(h))])).pow(2).mean() + torch.stack(tensors=Several([h, h])).sum()

    assert_as_alone(alone(step, Block), run_ranks(train, 2, step, Block, 2, {}))


def test_lists_of_indices_may_have_classes_of_their_own():
    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x))
        order = h.detach()[:, 0].argsort()
        return d(c(h)).index_put(Several([order]), h).pow(2).mean()

    assert_as_alone(alone(step, Block), run_ranks(train, 2, step, Block, 2, {}))


def answers() -> dict[str, Any]:
    """What Python code sees of placed tensors."""
    found: dict[str, Any] = {}

    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x))
        found["metadata"] = [
            *(tuple(h.shape), h.size(1), h.dim(), h.ndim, h.numel(), len(h), h.dtype, h.device, h.stride()),
            *(h.is_contiguous(), h.t().is_contiguous(), h.is_floating_point(), h.requires_grad, h.is_leaf, h.layout),
            *(h.is_cuda, h.element_size(), h.detach().requires_grad, isinstance(h, Tensor), torch.is_tensor(h)),
            *(h.nbytes, h.grad, tuple(h.shape[:-1]), torch.is_floating_point(h), h.get_device(), h.is_meta),
        ]
        s = h.sum().detach()
        found["values"] = [
            *(s.item(), float(s), int(s), bool(s > 0), s.tolist(), f"{s:.3f}", str(s), repr(s), s in h),
            *(s.numpy().tolist(), h.detach().argmax().item(), [0, 1, 2][h.argmax() % 3], torch.equal(h, h)),
            *(torch.allclose(h, h), h.max().item(), h.nonzero().shape[0]),
        ]
        return d(c(h)).mean()

    torch.manual_seed(0)
    net = Net(step)
    engine_for(net, 2, microbatches=1).train_step(net.loss, batch(), loss_of=lambda loss: loss)
    return found


def test_metadata_and_values_are_those_of_the_real_tensor_on_every_rank():
    def plain() -> list[Any]:
        torch.manual_seed(0)
        net = Net(one_after_the_other)
        h = net.blocks[1](net.blocks[0](batch()["x"]))
        return [h, h.sum().detach()]

    first, second = run_ranks(answers, 2)
    h, s = plain()
    assert first == second
    assert first["values"][:6] == [s.item(), float(s), int(s), bool(s > 0), s.tolist(), f"{s:.3f}"]
    assert first["values"][6] == str(s)
    assert first["metadata"][:9] == [
        *(tuple(h.shape), h.size(1), h.dim(), h.ndim, h.numel(), len(h), h.dtype, h.device, h.stride())
    ]
    assert first["metadata"][9:15] == [True, False, True, True, False, torch.strided]


class UsersError(Exception):
    pass


def raise_in_step(rank: int | None) -> tuple[str, float]:
    here = torch.distributed.get_rank()

    def step(net: Net, x: Tensor) -> Tensor:
        loss = one_after_the_other(net, x)
        if rank is None or rank == here:
            raise UsersError("from the step")
        return loss * loss.item()

    torch.manual_seed(0)
    net = Net(step)
    start = time.monotonic()
    try:
        engine_for(net, skip_tracing=rank is not None).train_step(net.loss, batch(), loss_of=lambda loss: loss)
    except (UsersError, PeerFailedError) as error:
        return type(error).__name__, time.monotonic() - start
    return "none", 0.0


def test_an_exception_of_the_step_keeps_its_type():
    assert [kind for kind, _ in run_ranks(raise_in_step, 2, None)] == ["UsersError", "UsersError"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_the_other_within_seconds(rank):
    results = run_ranks(raise_in_step, 2, rank)
    assert results[rank][0] == "UsersError"
    assert results[1 - rank][0] == "PeerFailedError"
    assert results[1 - rank][1] < 10


def evaluate(pp: int) -> list[Any]:
    def step(part: dict[str, Tensor]) -> Any:
        h = part["x"]
        for block in net.blocks:
            h = block(h)
        return {"h": h, "mean": h.mean(), "label": "text", "plain": part["x"].sum()}

    torch.manual_seed(0)
    net = Net(one_after_the_other)
    engine = engine_for(net, pp)
    with torch.no_grad():
        outputs = [engine.eval_step(step, batch(number)) for number in range(2)]
    return [output.outputs for output in outputs]


def test_results_of_evaluation_are_real_and_the_same_on_every_rank():
    (expected,) = run_ranks(evaluate, 1, 1)
    for found in run_ranks(evaluate, 2, 2):
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.keys() == other.keys()
                assert type(one["h"]) is Tensor
                assert torch.equal(one["h"], other["h"])
                assert torch.equal(one["mean"], other["mean"])
                assert one["label"] == "text"
                assert torch.equal(one["plain"], other["plain"])


def returns_a_dict() -> Any:
    def step(part: dict[str, Tensor]) -> Any:
        loss = one_after_the_other(net, part["x"])
        return {"loss": loss, "log": {"twice": loss.detach() * 2}, "size": len(part["x"])}

    torch.manual_seed(0)
    net = Net(one_after_the_other)
    result = engine_for(net).train_step(step, batch(), loss_of=lambda out: out["loss"])
    return result.outputs, result.loss


def test_a_step_may_return_a_dict():
    results = run_ranks(returns_a_dict, 2)
    for outputs, loss in results:
        assert [out["size"] for out in outputs] == [2, 2]
        assert all(torch.equal(out["log"]["twice"], out["loss"] * 2) for out in outputs)
        assert loss.item() == pytest.approx(sum(out["loss"].item() for out in outputs) / 2)
    assert all(torch.equal(results[0][0][i]["loss"], results[1][0][i]["loss"]) for i in range(2))
