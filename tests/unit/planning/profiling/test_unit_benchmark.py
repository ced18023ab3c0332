"""Microbenchmark of unit calls, without the surrounding model."""

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from smp_strategy.model.trace.prediction import Callee
from smp_strategy.planning.profiling import profiler
from smp_strategy.planning.profiling.profiler import measure_alone
from smp_strategy.planning.profiling.recorded_calls import CallLog, RecordedCall
from tests.unit.planning.profiling.surveyed import CPU, survey

MILLISECOND = 1e-3


class Clock:
    """Stands still but for what a test says something takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiler, "time", clock)
    return clock


def call(module: nn.Module, *args: Any, **kwargs: Any) -> RecordedCall:
    log = CallLog("cpu")
    log.note(Callee("unit", module.forward, module), args, kwargs)
    return log.calls[0]


def measured(module: nn.Module, *args: Any, times: bool = False) -> Any:
    return measure_alone(call(module, *args), CPU, times=times, memory=not times)


def real(*shape: int, grad: bool = True) -> Tensor:
    return torch.zeros(shape, requires_grad=grad)


class Sleeps(torch.autograd.Function):
    """Takes 4 ms forward, 8 ms for the gradient of the input, 16 ms for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: Clock) -> Tensor:
        clock.sleep(4 * MILLISECOND)
        ctx.clock = clock
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.clock.sleep((8 * of_x + 16 * of_weight) * MILLISECOND)
        return grad * weight, grad * x, None


class Slow(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x, self.weight, self.clock)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("trained", "needs_input_gradient", "expected"),
    [(False, True, (4, 8, 0)), (True, False, (4, 0, 16)), (False, False, (4, 0, 0))],
)
def test_forward_input_and_weight_gradients_are_timed_apart(trained, needs_input_gradient, expected, clock):
    module = Slow(clock).requires_grad_(trained)
    work = measured(module, real(4, grad=needs_input_gradient), times=True).work
    assert work == pytest.approx([milliseconds * MILLISECOND for milliseconds in expected])


def test_a_unit_that_computes_its_gradients_at_once_leaves_nothing_for_later(clock):
    # torch tells a Function what its inputs need, not what was asked for: only the sum can be known.
    work = measured(Slow(clock), real(4), times=True).work
    assert work == pytest.approx((4 * MILLISECOND, 24 * MILLISECOND, 0))


class TimedProducts(TorchDispatchMode):
    """Every product of matrices takes a millisecond, everything else nothing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.clock.sleep(MILLISECOND)
        return func(*args, **kwargs or {})


def test_the_weight_gradient_of_a_linear_layer_costs_as_much_as_the_others(clock):
    noted = call(nn.Linear(4, 4), real(4, 4))
    with TimedProducts(clock):
        sample = measure_alone(noted, CPU, times=True, memory=False)
    assert sample.work == pytest.approx((MILLISECOND, MILLISECOND, MILLISECOND))
    assert sample.split_seconds == pytest.approx(0, abs=1e-9)


class Restless(nn.Module):
    """Does in its forward what a unit may do: counts, draws, keeps tensors, updates statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.num_calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.linear(self.norm(x)) * torch.rand(())
        self.seen.append(x)
        self.last = x
        return x


def test_a_measurement_leaves_no_trace():
    module, hooked, gradients = Restless(), [], []
    module.linear.register_forward_hook(lambda *_: hooked.append(1))
    module.linear.weight.register_hook(gradients.append)
    module.linear.weight.grad = torch.ones(4, 4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes, random = set(vars(module)), torch.get_rng_state()
    sample = measure_alone(call(module, real(8, 4)), CPU, times=True, memory=True)
    assert sample.work.forward > 0
    assert sample.saved_bytes > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(module.linear.weight.grad, torch.ones(4, 4))
    assert set(vars(module)) == attributes
    assert (module.num_calls, module.seen, hooked, gradients) == (0, [], [], [])
    assert torch.equal(torch.get_rng_state(), random)


def test_a_unit_without_values_is_measured_with_random_ones():
    with torch.device("meta"):
        module = Restless()
    assert measured(module, real(8, 4)).saved_bytes == measured(Restless(), real(8, 4)).saved_bytes
    assert module.linear.weight.is_meta


def test_inputs_may_be_changed_in_place_and_views_that_overlap_themselves():
    class AddsInPlace(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x.add_(mask))

    inside = real(2, 4) * 1
    assert measured(AddsInPlace(4, 4), inside, torch.zeros(1).expand(2, 4), times=True).work.forward > 0


def test_whole_numbers_of_the_batch_are_given_as_they_are():
    class Repeats(nn.Linear):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return super().forward(x.repeat_interleave(counts, 0))

    saved = measured(Repeats(4, 4), real(2, 4), torch.tensor([1, 6])).saved_bytes
    assert saved >= 7 * 4 * 4


def test_the_autocast_of_the_call_counts():
    module, x = nn.Linear(8, 8), real(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        noted = call(module, x)
    halved = measure_alone(noted, CPU, times=True, memory=True)
    assert halved.saved_bytes < measured(module, x).saved_bytes + module.weight.nbytes
    assert halved.work.weight_gradient > 0


class Cache:
    def __init__(self) -> None:
        self.entries: list[Tensor] = []


class Caching(nn.Linear):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.entries.append(super().forward(x))
        return torch.cat(cache.entries)


def test_a_cache_among_the_arguments_is_copied_for_each_run():
    cache = Cache()
    cache.entries.append(torch.zeros(3, 4))
    noted = call(Caching(4, 4), real(2, 4), cache)
    assert not noted.obstacle
    assert measure_alone(noted, CPU, times=True, memory=False).work.forward > 0
    assert len(cache.entries) == 1


def test_an_object_that_cannot_be_copied_is_an_obstacle():
    cache = Cache()
    cache.lock = threading.Lock()  # type: ignore[attr-defined]
    assert call(Caching(4, 4), real(2, 4), cache).obstacle == "it gets an object that cannot be copied (Cache)"


def conv_net() -> nn.Module:
    def block(width: int, wide: int) -> nn.Module:
        layers = [nn.Conv2d(width, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, wide, 3)]
        return nn.Sequential(*layers, nn.BatchNorm2d(wide), nn.ReLU(inplace=True))

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(block(4, 4), block(4, 8)), head)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0)
    )


def vit() -> nn.Module:
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16)
    config.patch_size = 4
    return ViTForImageClassification(config)


MODELS: dict[str, tuple[Any, Any, Tensor]] = {
    "convolutions": (conv_net, lambda net, x: net(x).square().mean(), torch.zeros(4, 3, 12, 12)),
    "GPT-2": (gpt2, lambda net, x: net(x, labels=x).loss, torch.zeros(2, 16, dtype=torch.int64)),
    "ViT": (vit, lambda net, x: net(pixel_values=x).logits.square().mean(), torch.zeros(2, 3, 16, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_modelled_activation_bytes_are_those_that_autograd_keeps(name):
    make, step, batch = MODELS[name]
    model = make()
    found = survey(model, lambda x: step(model, x), batch)
    modelled = [event.saved_bytes for event in found.trace.events if event.kind == "unit"]
    assert len(modelled) > 3
    kept = [measure_alone(each, CPU, times=False, memory=True).saved_bytes for each in found.calls]
    assert kept == modelled


def test_calls_of_units_that_are_built_alike_are_of_one_kind():
    model = gpt2()
    found = survey(model, lambda x: model(x, labels=x).loss, torch.zeros(2, 16, dtype=torch.int64))
    kinds = {each.unit: each.kind for each in found.calls}
    assert kinds["transformer.h.0"] == kinds["transformer.h.1"]
    assert len(set(kinds.values())) == len(kinds) - 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(call(nn.Linear(4, 5), real(2, 4)), id="shape of a parameter"),
        pytest.param(call(nn.Linear(4, 4).requires_grad_(False), real(2, 4)), id="frozen"),
        pytest.param(call(nn.Linear(4, 4), real(3, 4)), id="shape of an input"),
        pytest.param(call(nn.Linear(4, 4), real(2, 4, grad=False)), id="no input gradient"),
        pytest.param(call(nn.Linear(4, 4).eval(), real(2, 4)), id="mode"),
        pytest.param(torch.no_grad()(call)(nn.Linear(4, 4), real(2, 4)), id="without gradients"),
        pytest.param(call(nn.Sequential(nn.Linear(4, 4)), real(2, 4)), id="class"),
    ],
)
def test_what_may_change_costs_makes_another_kind(other):
    one = call(nn.Linear(4, 4), real(2, 4)).kind
    assert one == call(nn.Linear(4, 4), real(2, 4)).kind
    assert other.kind != one


class SleepsOnTheWay(torch.autograd.Function):
    """Takes 10 ms for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.sleep(10 * MILLISECOND)
        return grad, None


class SlowWeight(nn.Linear):
    def __init__(self, clock: Clock) -> None:
        super().__init__(4, 4)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        weight = SleepsOnTheWay.apply(self.weight, self.clock)  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight)


def test_a_backward_is_split_as_the_runtime_splits_it(clock):
    sample = measured(SlowWeight(clock), real(4, 4), times=True)
    assert sample.work == pytest.approx((0, 0, 10 * MILLISECOND))
    assert sample.split_seconds == pytest.approx(0, abs=1e-9)


class SlowResult(nn.Linear):
    """Both of its gradients need the gradient of what its weight gives."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4, 4)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        return SleepsOnTheWay.apply(super().forward(x), self.clock)  # type: ignore[no-untyped-call]


def test_what_both_gradients_need_is_computed_once_with_the_input_gradient(clock):
    sample = measured(SlowResult(clock), real(4, 4), times=True)
    assert sample.work == pytest.approx((0, 10 * MILLISECOND, 0))
    assert sample.split_seconds == pytest.approx(0, abs=1e-9)


class Unsteady(nn.Linear):
    """Takes nothing, 10 ms and 20 ms in turn, each twice."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4, 4)
        self.clock = clock
        self.naps = itertools.cycle(length * MILLISECOND for length in (0, 0, 10, 10, 20, 20))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(next(self.naps))
        return super().forward(x)


def test_how_much_times_differ_is_measured(clock):
    # Two thirds of them are 10 ms from the median.
    found = measured(Unsteady(clock), real(4, 4), times=True).spread_seconds
    assert found == pytest.approx(profiler.NORMAL * 10 * MILLISECOND)
