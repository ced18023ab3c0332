"""When something goes to the host, in which order, and when it comes back; on a device that writes it down."""

import weakref

import torch
from torch import Tensor

from smp_strategy.distributed.host_copies import HostCopies
from tests.unit.activations.double import Device
from tests.unit.activations.offloading import (
    NBYTES,
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


def test_a_store_begins_when_the_call_returns_and_not_before() -> None:
    device = Device()
    offload = offload_on(device)

    def watched(x: Tensor) -> Tensor:
        y = torch.sigmoid(torch.tanh(x))
        assert not device.log
        return y

    with offload.step(None):
        chain(offload, [watched], leaf())
        assert device.log == [f"store 1: {NBYTES}", f"store 2: {NBYTES}"]


def test_memory_of_the_device_is_free_when_its_copy_is_done() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    storages = []

    def inner(x: Tensor) -> Tensor:
        y = torch.tanh(x * 1)
        storages.append(weakref.ref(y.untyped_storage()))
        return y * 2  # `y` itself is nobody's but backward's

    with offload.step(None):
        y = chain(offload, [inner, inner], x)
        assert all(storage() is not None for storage in storages)
        device.work()
        y = chain(offload, [inner], y)
        assert [storage() is None for storage in storages] == [True, True, False]
        y.sum().backward()


def test_computation_waits_for_a_copy_where_too_many_are_under_way() -> None:
    device = Device()
    offload = offload_on(device)
    with offload.step(None):
        chain(offload, [saving] * 3, leaf())
        assert not of_kind(device.log, "wait")
        chain(offload, [saving], leaf())
        assert of_kind(device.log, "wait") == ["wait for store 1"]
        assert offload.traffic.num_held_up == 1


def test_loads_begin_a_number_of_calls_ahead_when_calls_are_counted() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device, horizon=2)
    begun: list[int] = []

    def watched(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y.register_hook(lambda gradient: begun.append(len(of_kind(device.log, "load"))))
        return y

    with offload.step(None):
        y = chain(offload, [watched] * 5, x) * 1
        done(device, offload)
        offload.begin_backward(0)
        y.sum().backward()
    # When the last call's node is about to run, and so on: each call that is arrived at begins one more load.
    assert begun == [2, 3, 4, 5, 5]
    assert offload.traffic.num_late == 0
    assert torch.equal(x.grad, gradient([saving] * 5, x.detach().requires_grad_()))


def test_calls_that_backward_reaches_within_the_horizon_stay_once_their_number_is_known() -> None:
    device = Device()
    offload = offload_on(device, horizon=2)
    with offload.step(None, backward_follows=True):
        for microbatch in range(2):
            offload.reach(2 * microbatch)
            y = chain(offload, [saving] * 5, leaf(), (microbatch, 0))
            device.work()
            offload._go_on()
            stores = of_kind(device.take_log(), "store")
            assert len(stores) == (5 if microbatch == 0 else 3)
            offload.reach(2 * microbatch + 1)
            offload.begin_backward(microbatch)
            y.sum().backward()
    assert offload.traffic.num_late == 0


def test_loads_begin_a_number_of_actions_ahead_under_a_plan() -> None:
    device = Device()
    offload = offload_on(device, horizon=2)
    # F0 F1 F2 F3 B0 B1 B2 B3
    uses = {(number, 0): 4 + number for number in range(4)}
    results, loads, stores = {}, {}, {}
    with offload.step(uses):
        for position in range(8):
            offload.reach(position)
            loads[position] = len(of_kind(device.take_log(), "load"))
            if position < 4:
                results[position] = chain(offload, [squaring], leaf() * 1, (position, 0))
            else:
                results.pop(position - 4).sum().backward()
            device.work()
            stores[position] = len(of_kind(device.log, "store"))
    assert stores == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0, 5: 0, 6: 0, 7: 0}
    assert loads == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 0, 7: 0}
    assert offload.traffic.num_late == 0


def test_nothing_goes_out_whose_backward_comes_within_the_horizon() -> None:
    device = Device()
    offload = offload_on(device, horizon=1)
    with offload.step({(number, 0): 2 * number + 1 for number in range(3)}):
        for number in range(3):
            offload.reach(2 * number)
            y = chain(offload, [saving, squaring], leaf(), (number, 0))
            offload.reach(2 * number + 1)
            y.sum().backward()
    assert not device.log


def test_of_calls_that_wait_for_their_copies_the_one_needed_last_goes_first() -> None:
    device = Device()
    offload = offload_on(device)
    uses = {(0, 0): 10, (1, 0): 11, (2, 0): 40, (3, 0): 30, (4, 0): 20}
    sizes = {}
    with offload.step(uses):
        results = []
        for number, (microbatch, _) in enumerate(uses):
            offload.reach(number)
            x = torch.randn(256 * (number + 1), requires_grad=True)
            sizes[microbatch] = x.nbytes
            results.append(chain(offload, [saving], x, (microbatch, 0)))
        order = [int(line.split(": ")[1]) for line in of_kind(device.log, "store")]
    # Two are under way, one may wait: then 2 and 3 compete, and 3 and 4.
    assert order == [sizes[0], sizes[1], sizes[2], sizes[3]]


def test_what_is_expected_before_its_copy_has_begun_stays_on_the_device() -> None:
    device = Device()
    offload = offload_on(device, horizon=1)
    with offload.step(None):
        y = chain(offload, [saving] * 3, leaf())
        assert len(of_kind(device.log, "store")) == 2
        offload.begin_backward(0)
        # And it waits for nothing any more: another call can wait in its place.
        run(offload, saving, (1, 0), leaf())
        assert offload.traffic.num_held_up == 0
        y.sum().backward()
        device.work()
    assert not of_kind(device.log, "load 3")


def test_of_a_call_what_was_saved_last_comes_back_first() -> None:
    device, x = Device(), torch.randn(512, requires_grad=True)
    offload = offload_on(device)
    with offload.step(None):
        y = chain(offload, [lambda x: torch.tanh(torch.tanh(x)[:256] * 1)], x) * 1
        done(device, offload)
        device.take_log()
        offload.begin_backward(0)
        assert [line.split(": ")[1] for line in of_kind(device.log, "load")] == ["1024", "2048"]
        y.sum().backward()


def test_memory_of_copies_under_way_is_used_again_after_them() -> None:
    device = Device()
    offload = offload_on(device)
    with offload.step(None):
        y = chain(offload, [saving], leaf()) * 1
        done(device, offload)
        offload.begin_backward(0)
        device.take_log()
        del y  # without a backward, and before anybody has waited
        assert device.take_log() == ["wait for load 2"]
        run(offload, saving, (1, 0), leaf())
        assert device.after == {"store 1": [], "load 2": ["store 1"], "store 3": ["load 2"]}


def test_a_tensor_that_is_on_the_host_already_frees_the_device_when_another_call_saves_it() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    h = x * 1
    storage = weakref.ref(h.untyped_storage())
    with offload.step(None):
        first = run(offload, squaring, (0, 0), h)
        done(device, offload)
        second = run(offload, squaring, (0, 0), h)
        del h
        assert storage() is None
        (first + second).sum().backward()
    assert len(of_kind(device.log, "store")) == 1
    assert torch.equal(x.grad, 4 * x.detach())


def test_what_somebody_else_has_kept_on_the_device_is_not_loaded() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    h = x * 1
    with offload.step(None):
        y = run(offload, squaring, (0, 0), h)
        done(device, offload)
        y.sum().backward()
    assert device.log == [f"store 1: {NBYTES}"]
    assert torch.equal(x.grad, 2 * h)


def test_what_comes_back_begins_at_an_address_as_round_as_before() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    with offload.step(None):
        y = run(offload, lambda x: x.flatten()[130:].pow(2), (0, 0), x * 1)  # from byte 520 on
        done(device, offload)
        assert device.log == [f"store 1: {NBYTES - 512}"]
        y.sum().backward()
    assert torch.equal(x.grad.flatten()[130:], 2 * x.detach().flatten()[130:])


def test_a_tensor_that_was_changed_since_is_another_one() -> None:
    x = leaf()
    offload = offload_on(HostCopies(torch.device("cpu")))
    h = x * 1
    with offload.step(None):
        first = run(offload, squaring, (0, 0), h)
        with torch.no_grad():
            h.add_(1)
        second = run(offload, squaring, (0, 0), h)
        del h
        (first + second).sum().backward()
    assert torch.equal(x.grad, 2 * (x.detach() + 1) + 2 * x.detach())


def test_what_is_expected_while_it_leaves_is_not_loaded() -> None:
    device, x = Device(), leaf()
    offload = offload_on(device)
    with offload.step(None):
        y = chain(offload, [saving], x) * 1
        offload.begin_backward(0)
        device.work()
        run(offload, saving, (1, 0), leaf())
        y.sum().backward()
    assert not of_kind(device.log, "load")
    assert torch.equal(x.grad, gradient([saving], x))
