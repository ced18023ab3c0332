"""What goes to the host and what comes back, whatever is done with it meanwhile; on a device that writes it down."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.distributed.host_copies import HostCopies
from smp_strategy.errors import UnsupportedError
from tests.unit.activations.double import Device
from tests.unit.activations.offloading import (
    NBYTES,
    WIDTH,
    chain,
    done,
    gradient,
    leaf,
    of_kind,
    offload_on,
    run,
    saving,
    squaring,
)


def test_what_goes_out_comes_back_with_the_same_bits() -> None:
    device, x = Device(), leaf()
    functions = [saving, squaring, saving, torch.sigmoid, squaring]
    expected = gradient(functions, x)
    offload = offload_on(device)
    with offload.step(None):
        y = chain(offload, functions, x) * 1
        done(device, offload)
        assert offload._memory.leased
        y.sum().backward()
    assert torch.equal(x.grad, expected)
    assert offload.traffic.bytes_in == offload.traffic.bytes_out == 3 * NBYTES


def test_a_tensor_that_several_nodes_and_calls_save_travels_once() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    function = lambda x: torch.sin(x) + torch.cos(x) + x.pow(3)  # noqa: E731
    h = x * 1
    with offload.step(None):
        results = [run(offload, function, (0, 0), h) for _ in range(3)]
        del h
        done(device, offload)
        sum(results).sum().backward()
    assert [line.split(": ")[1] for line in of_kind(device.log, "store")] == [str(NBYTES)]
    assert len(of_kind(device.log, "load")) == 1
    expected = gradient([lambda x: sum([function(x * 1)] * 3)], x)
    torch.testing.assert_close(x.grad, expected)


def test_views_of_one_storage_travel_together_and_come_back_as_views() -> None:
    device = Device()
    offload = offload_on(device)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.extend(ctx.saved_tensors)
            return (None,) * len(ctx.saved_tensors)

    def views_of(base: Tensor) -> list[Tensor]:
        q, k, v = base.chunk(3, dim=1)
        return [q, k.t(), v.unfold(0, 2, 1), base[3:5].expand(2, 2, WIDTH), base.view(torch.float64)[1], base.flip(0)]

    base = torch.randn(WIDTH, WIDTH)
    wanted = [(view.clone(), view.stride()) for view in views_of(base)]
    kept = [base]
    del base
    with offload.step(None):
        y = run(offload, lambda x: Look.apply(*views_of(kept.pop()), x), (0, 0), leaf())
        device.work()
        y.backward()
    assert len(of_kind(device.log, "store")) == 3  # the base, the flipped copy, the leaf
    for tensor, (values, stride) in zip(seen, wanted, strict=False):
        assert torch.equal(tensor, values)
        assert tensor.stride() == stride
    storages = {tensor.untyped_storage().data_ptr() for tensor in seen[:5]}
    assert len(storages) == 1


def test_of_a_storage_only_what_is_saved_travels() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    with offload.step(None):
        y = run(offload, lambda x: x[32:].pow(2), (0, 0), x * 1)
        device.work()
        y.sum().backward()
    assert device.log[0] == f"store 1: {NBYTES // 2}"
    assert torch.equal(x.grad[32:], 2 * x.detach()[32:])


def test_weights_the_batch_small_tensors_and_strange_ones_stay() -> None:
    device = Device()
    layer, batch = nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    offload = offload_on(device, min_bytes=1024, weights=layer.parameters)

    def function(x: Tensor) -> Tensor:
        h = x @ layer.weight.t() + (x.narrow(0, 0, 4) @ layer.weight.detach()).sum()
        small = torch.tanh(h[:2, :2].clone())
        conjugated = torch.complex(h, h) * torch.view_as_complex(torch.ones(WIDTH, WIDTH, 2))
        return small.sum() + conjugated.abs().sum()

    with offload.step(None, batch=[batch]):
        y = run(offload, function, (0, 0), batch[:])
        sizes = [int(line.split(": ")[1]) for line in device.log]
        y.backward()
    # The product with the weights, and the complex numbers.
    assert sorted(sizes) == [NBYTES, 2 * NBYTES, 2 * NBYTES]


def test_what_is_elsewhere_than_on_the_device_stays() -> None:
    device, x = Device("cuda"), leaf()
    offload = offload_on(device)
    with offload.step(None):
        chain(offload, [saving, squaring], x).sum().backward()
    assert not device.log


def test_transforms_inside_of_a_unit_are_refused_with_the_remedy() -> None:
    class Energy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: x.pow(2).sum())(x)

    offload, unit = offload_on(Device()), Energy()
    with offload.step(None):
        offload.enter((0, 0))
        with pytest.raises(UnsupportedError, match="Energy is a unit whose activations .* Leave it out: name"):
            offload.around(unit, unit)(leaf())


def test_copies_that_stand_in_for_weights_during_a_call_stay() -> None:
    device, layer = Device(), nn.Linear(WIDTH, WIDTH).double()
    offload = offload_on(device, weights=layer.parameters)

    def in_single_precision(x: Tensor) -> Tensor:
        master = layer._parameters["weight"]
        layer._parameters["weight"] = nn.Parameter(master.detach().float())
        try:
            return nn.functional.linear(x, layer.weight)
        finally:
            layer._parameters["weight"] = master

    with offload.step(None):
        offload.enter((0, 0))
        y = offload.around(in_single_precision, layer)(leaf() * 1)
        assert device.log == [f"store 1: {NBYTES}"]
        y.sum().backward()


def test_a_second_backward_through_the_same_graph_loads_again() -> None:
    device, x = Device(), leaf()
    functions = [saving, squaring, torch.sigmoid]
    expected = gradient(functions, x)
    offload = offload_on(device)
    with offload.step(None):
        y = chain(offload, functions, x) * 1
        done(device, offload)
        y.sum().backward(retain_graph=True)
        loads = len(of_kind(device.log, "load"))
        x.grad = None
        y.sum().backward()
    assert torch.equal(x.grad, expected)
    assert len(of_kind(device.log, "load")) > loads


def test_a_graph_may_outlive_the_step() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    with offload.step(None):
        y = chain(offload, [saving, squaring, saving], x)
    y.sum().backward()
    assert torch.equal(x.grad, gradient([saving, squaring, saving], x))
    assert offload._memory.leased == 0 or y is not None


def test_derivatives_of_derivatives_are_those_without_offload() -> None:
    device, x = Device(), leaf()

    def second(run: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    offload = offload_on(device)
    expected = second(lambda x: squaring(saving(x)))
    with offload.step(None):
        assert torch.equal(second(lambda x: chain(offload, [saving, squaring], x)), expected)


@pytest.mark.parametrize("when", ["in the call", "after it"])
def test_a_change_in_place_is_the_error_that_autograd_makes_of_it(when: str) -> None:
    device = Device()
    offload = offload_on(device)
    changed = []

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        if when == "in the call":
            y.add_(1)
        changed.append(y)
        return y * 1

    with offload.step(None):
        y = run(offload, function, (0, 0), leaf())
        with torch.no_grad():
            changed[0].add_(1)
        device.work()
        run(offload, saving, (0, 0), leaf())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_change_after_the_copy_does_no_harm() -> None:
    x = leaf()
    offload = offload_on(HostCopies(torch.device("cpu")))
    with offload.step(None):
        y = run(offload, squaring, (0, 0), h := x * 1)
        with torch.no_grad():
            h.add_(1)
        y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_memory_that_is_read_or_written_still_is_not_used_for_something_else() -> None:
    """The device does nothing before it must: whoever forgets to wait gets other numbers."""
    device = Device()
    offload = offload_on(device)
    for _ in range(3):
        xs = [leaf() for _ in range(4)]
        with offload.step(None):
            for number, x in enumerate(xs):
                y = chain(offload, [saving, squaring, saving, squaring], x, (number, 0))
                offload.begin_backward(number)
                if number != 1:  # else: a graph that is dropped while copies are under way
                    y.sum().backward()
                del y
        for number, x in enumerate(xs):
            if number != 1:
                assert torch.equal(x.grad, gradient([saving, squaring] * 2, x.detach().requires_grad_()))
    assert offload._memory.leased == 0


@pytest.mark.parametrize("how", ["dropped", "exception in a call", "exception in backward"])
def test_nothing_leaks(how: str) -> None:
    device = Device()
    offload = offload_on(device)

    def failing(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        if how == "exception in a call":
            raise ValueError("on purpose")
        y.register_hook(_raise) if how == "exception in backward" else None
        return y

    gc.disable()
    try:
        for _ in range(2):
            x = leaf()
            try:
                with offload.step(None):
                    y = chain(offload, [saving, squaring, failing, saving], x)
                    if how != "dropped":
                        y.sum().backward()
            except ValueError:
                pass
            y = x = None
            device.work()
            assert offload._memory.leased == 0
            assert not offload._leaving
            assert not offload._waiting
    finally:
        gc.enable()
    with offload.step(None):
        pass
    with offload.step(None):
        pass
    assert offload._memory.allocated == 0


def _raise(gradient: Tensor) -> None:
    raise ValueError("on purpose")


def test_hooks_of_the_user_around_a_unit_get_what_stays() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device, min_bytes=NBYTES)
    seen = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    with (
        offload.step(None),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        y = run(offload, lambda x: torch.tanh(x).sum().pow(2), (0, 0), x)
    y.backward()
    assert seen == [1]
    assert len(of_kind(device.log, "store")) == 1


def test_outside_of_a_step_nothing_goes_out() -> None:
    device = Device()
    offload = offload_on(device)
    chain(offload, [saving, squaring], leaf()).sum().backward()
    assert not device.log


def test_a_step_that_leaves_its_plan_counts_calls() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device, horizon=1)
    with offload.step({(0, 0): 9}):
        offload.reach(0)
        y = chain(offload, [saving] * 2, x)
        offload.leave_plan()
        y = chain(offload, [saving] * 2, y)
        device.work()
        offload.begin_backward(0)
        y.sum().backward()
    assert offload.traffic.num_late == 0
    assert torch.equal(x.grad, gradient([saving] * 4, x))


def test_the_cpu_takes_the_same_way() -> None:
    x = leaf()
    offload = offload_on(HostCopies(torch.device("cpu")))
    functions = [saving, squaring, torch.sigmoid]
    with offload.step(None):
        chain(offload, functions, x).sum().backward()
    assert torch.equal(x.grad, gradient(functions, x))
    assert offload.traffic.bytes_out > 0
    assert offload.traffic.bytes_in > 0
    assert offload.traffic.most_on_host > 0
