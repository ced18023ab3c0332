"""The verbs of PyTorch's scaler, on one rank: what it is told is what all ranks have found."""

import math

import pytest
import torch
from torch import nn

from smp_strategy.data_parallel.grad_norm import UnscaleResult, unscale_gradients
from smp_strategy.data_parallel.parameter_pieces import ShardedGradient
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.errors import SMPError
from smp_strategy.precision.master_weights import set_gradient_dtype


def unscale(optimizer, scale):
    return unscale_gradients([each for group in optimizer.param_groups for each in group["params"]], scale)


def made(**rules):
    parameter = nn.Parameter(torch.zeros(3))
    return GradScaler(ScalingRules(**rules), unscale), parameter, torch.optim.SGD([parameter], lr=1.0)


def test_a_step_is_that_of_pytorch():
    ours, parameter, optimizer = made(init_scale=3000.0)
    theirs, like = torch.amp.GradScaler("cpu", init_scale=3000.0), nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([like], lr=1.0)
    for scaler, weight, stepped in ((ours, parameter, optimizer), (theirs, like, sgd)):
        scaler.scale((weight * torch.tensor([0.1, 0.7, 1e-9])).sum()).backward()
        scaler.step(stepped)
        scaler.update()
    assert torch.equal(parameter, like)
    assert not torch.equal(parameter, torch.zeros(3))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_skips_the_step_and_shrinks_the_scale(bad):
    scaler, parameter, optimizer = made()
    parameter.grad = torch.tensor([1.0, bad, 1.0])
    scaler.step(optimizer)
    assert scaler.has_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(parameter, torch.zeros(3))
    parameter.grad = torch.ones(3)
    scaler.step(optimizer)
    assert not scaler.has_skipped(optimizer)


def test_where_nobody_has_a_gradient_the_scale_does_not_change():
    scaler, _, optimizer = made(window=1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16


def test_gradients_are_divided_by_the_scale_of_their_backward():
    """Of two optimizers the first one's overflow shrinks the scale before the second one has stepped."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (first, second)]
    scaler = GradScaler(ScalingRules(), unscale)
    scaler.scale((first * math.inf + second).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert first.item() == 0.0
    assert second.item() == -1.0


def test_gradients_that_are_collected_over_steps_of_another_optimizer_are_brought_to_the_new_scale():
    often, seldom = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (often, seldom)]
    scaler = GradScaler(ScalingRules(window=1), unscale, lambda: optimizers)
    for number in range(1, 4):
        scaler.scale((often + number * seldom).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if number < 3:
            optimizers[0].zero_grad()
    assert often.grad.item() == 1.0
    scaler.step(optimizers[1])
    assert seldom.grad.item() == 6.0
    assert scaler.get_scale() == 2.0**19


def test_gradients_that_wait_divided_while_another_optimizer_steps_are_not_divided_again():
    """Clipping divides. Both are clipped before the first one steps, and changes the scale."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (first, second)]
    scaler = GradScaler(ScalingRules(window=1), unscale, lambda: optimizers)
    scaler.scale((first + second).sum()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        assert scaler.has_unscaled(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert first.item() == second.item() == -1.0
    assert scaler.get_scale() == 2.0**17  # one backward, looked at once


def test_what_overflowed_before_another_optimizer_stepped_is_skipped_all_the_same():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (first, second)]
    scaler = GradScaler(ScalingRules(), unscale, lambda: optimizers)
    scaler.scale((first + second * math.inf).sum()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert first.item() == -1.0
    assert second.item() == 0.0
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("window", [1, 2000])
def test_gradients_that_were_divided_to_be_clipped_go_on_collecting(window):
    parameter, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (parameter, other)]
    scaler = GradScaler(ScalingRules(window=window), unscale, lambda: optimizers)
    for number in (1.0, 2.0, 4.0):
        scaler.scale((number * parameter + other).sum()).backward()
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
        other.grad = None
    assert parameter.grad.item() == 7.0
    scaler.step(optimizers[0])
    assert parameter.item() == -7.0


def test_gradients_are_not_divided_twice():
    scaler, parameter, optimizer = made()
    parameter.grad = torch.ones(3)
    scaler.unscale_(optimizer)
    with pytest.raises(SMPError, match="divided by the scale twice"):
        scaler.unscale_(optimizer)


def test_a_static_scale_that_overflows_is_said():
    scaler, parameter, optimizer = made(init_scale=8.0, growth_factor=1.0, backoff_factor=1.0)
    parameter.grad = torch.full((3,), math.inf)
    scaler.step(optimizer)
    with pytest.warns(UserWarning, match=r"(?s)loss scale of 8, which is static .* `loss_scale=dynamic`"):
        scaler.update()


def test_several_losses_are_scaled():
    scaler, *_ = made(init_scale=4.0)
    scaled = scaler.scale([torch.ones(()), (torch.full((), 2.0),)])
    assert scaled == [torch.tensor(4.0), (torch.tensor(8.0),)]


def test_gradients_of_all_kinds_are_divided():
    pieces, halves, sparse, doubles = (nn.Parameter(torch.zeros(4)) for _ in range(4))
    pieces.grad = ShardedGradient(pieces, torch.full((2,), 8.0), start=1, is_used=True)
    halves.data = halves.data.half()
    halves.grad = torch.full((4,), 8.0, dtype=torch.float16)
    sparse.grad = torch.tensor([0.0, 8.0, 8.0, 0.0]).to_sparse()
    doubles.data = doubles.data.double()
    doubles.grad = torch.full((4,), 8.0, dtype=torch.float64)
    empty = nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    assert (
        unscale_gradients([pieces, halves, sparse, doubles, empty, nn.Parameter(torch.ones(1))], 8.0)
        is UnscaleResult.FINITE
    )
    assert torch.equal(pieces.grad.piece, torch.ones(2))
    assert torch.equal(halves.grad, torch.ones(4, dtype=torch.float16))
    assert torch.equal(sparse.grad.to_dense(), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert torch.equal(doubles.grad, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(("divided", "expected"), [(65000.0, UnscaleResult.FINITE), (70000.0, UnscaleResult.OVERFLOW)])
def test_a_gradient_that_its_parameter_has_no_room_for_overflows(divided, expected):
    """It is added up in float32, and the optimizer gets it as float16."""
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    set_gradient_dtype(parameter, torch.float32)
    parameter.grad = torch.tensor([8.0, -8.0 * divided])
    assert unscale_gradients([parameter], 8.0) is expected
    assert parameter.grad[0] == 1.0
