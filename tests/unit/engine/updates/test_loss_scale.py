"""How the loss scale changes: as SageMaker's scaler, and as PyTorch's where that has the options."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.engine.updates.loss_scale import LossScale, ScalingRules
from smp_strategy.errors import ConfigError

OVERFLOWS = st.lists(st.booleans(), max_size=60)


def scales(rules, overflows):
    state = rules.begin()
    found = [state.scale]
    for overflowed in overflows:
        state = rules.next(state, overflowed=overflowed)
        found.append(state.scale)
    return found


@given(
    overflows=OVERFLOWS,
    init=st.sampled_from([1.0, 3.0, 2.0**16, 2.0**126]),
    factor=st.sampled_from([2.0, 3.0, 1.1, 1000.0]),
    window=st.integers(1, 7),
)
def test_without_options_of_sagemaker_the_scale_is_that_of_pytorch(overflows, init, factor, window):
    torch_scaler = torch.amp.GradScaler(
        "cpu", init_scale=init, growth_factor=factor, backoff_factor=1 / factor, growth_interval=window
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    expected = [torch_scaler.get_scale()]
    for overflowed in overflows:
        torch_scaler.scale(torch.zeros(()))
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), math.inf if overflowed else 1.0)
        torch_scaler.step(optimizer)
        torch_scaler.update()
        expected.append(torch_scaler.get_scale())
    options = PrecisionOptions(init_scale=init, scale_factor=factor, scale_window=window, min_scale=0.0)
    assert scales(ScalingRules.of(options), overflows) == expected


class Published:
    """SageMaker's ``DynamicLossScaler``, with powers of two, for which its double precision is exact."""

    def __init__(self, init, factor, window, least, delayed_shift, consecutive):
        self.scale, self.factor, self.window, self.least = init, factor, window, least
        self.delayed_shift, self.consecutive = delayed_shift, consecutive
        self.hysteresis, self.iteration, self.last_overflow = delayed_shift, 0, -1

    def update(self, overflowed):
        if overflowed:
            if self.delayed_shift == 1 or self.hysteresis == 1:
                self.scale = max(self.scale / self.factor, self.least)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.hysteresis = self.delayed_shift
            if (self.iteration - self.last_overflow) % self.window == 0:
                if not self.consecutive:
                    self.hysteresis = self.delayed_shift
                self.scale *= self.factor
        self.iteration += 1
        return self.scale


@given(
    overflows=OVERFLOWS,
    window=st.integers(1, 5),
    least=st.sampled_from([1.0, 2.0**10]),
    delayed_shift=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_the_scale_is_that_of_sagemaker(overflows, window, least, delayed_shift, consecutive):
    published = Published(2.0**20, 2.0, window, least, delayed_shift, consecutive)
    rules = ScalingRules(
        init_scale=2.0**20,
        window=window,
        min_scale=least,
        delayed_shift=delayed_shift,
        consecutive_hysteresis=consecutive,
    )
    assert scales(rules, overflows) == [2.0**20, *map(published.update, overflows)]


def test_a_static_scale_stays_and_is_stuck_at_the_first_overflow():
    rules = ScalingRules.of(PrecisionOptions(loss_scale=1000.0))
    assert set(scales(rules, [True, False, True] * 5)) == {1000.0}
    assert rules.is_stuck(rules.begin())


def test_the_scale_is_stuck_only_where_another_overflow_changes_nothing():
    rules = ScalingRules(init_scale=2.0, min_scale=1.0, delayed_shift=2)
    state = rules.begin()
    found = []
    for _ in range(4):
        found.append(rules.is_stuck(state))
        state = rules.next(state, overflowed=True)
    assert found == [False, False, True, True]


@given(overflows=OVERFLOWS, rest=OVERFLOWS, delayed_shift=st.integers(1, 3))
def test_a_restored_scale_goes_on_as_if_nothing_had_been(overflows, rest, delayed_shift):
    rules = ScalingRules(window=4, delayed_shift=delayed_shift)
    state = rules.begin()
    for overflowed in overflows:
        state = rules.next(state, overflowed=overflowed)
    restored = rules.restored(rules.state_dict(state))
    assert restored == state
    for overflowed in rest:
        state, restored = (rules.next(each, overflowed=overflowed) for each in (state, restored))
    assert restored == state


def test_pytorch_goes_on_with_a_saved_scale_and_the_other_way():
    rules = ScalingRules(init_scale=2.0**10, window=3)
    state = rules.next(rules.begin(), overflowed=False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(rules.state_dict(state))
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0**10, 3)
    assert {"hysteresis": 1, **scaler.state_dict()} == {**rules.state_dict(state)}
    assert rules.restored(scaler.state_dict()) == state


def test_another_window_takes_effect_where_a_run_goes_on():
    saved = ScalingRules(window=100).state_dict(LossScale(scale=8.0, good_steps=50))
    state = ScalingRules(window=10).restored(saved)
    assert ScalingRules(window=10).next(state, overflowed=False).scale == 16.0


def test_a_static_scale_is_that_of_the_options_whatever_was_saved():
    saved = ScalingRules().state_dict(LossScale(scale=8.0))
    assert ScalingRules.static(128.0).restored(saved).scale == 128.0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss_scale": "static"}, "`loss_scale` must be `dynamic` or a number, but is 'static'"),
        ({"loss_scale": 0}, "`loss_scale` must be above 0"),
        ({"init_scale": math.inf}, "`init_scale` must be above 0 and finite"),
        ({"scale_factor": 1.0}, "`scale_factor` must be above 1"),
        ({"scale_window": 0}, "`scale_window` must be at least 1"),
        ({"min_scale": 2.0**17}, "`min_scale` must be between 0 and `init_scale`"),
        ({"delayed_shift": 0}, "`delayed_shift` must be at least 1"),
        ({"consecutive_hysteresis": True}, "`consecutive_hysteresis=True` has no effect"),
        ({"loss_scale": 8.0, "scale_window": 5}, r"`scale_window=5` contradict `loss_scale=8.0`"),
    ],
)
def test_scales_that_cannot_be_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        SMPConfig(**options)


def test_scales_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SMP_LOSS_SCALE", "1024")
    assert ScalingRules.of(SMPConfig.from_options()).begin().scale == 1024.0
    monkeypatch.setenv("SMP_LOSS_SCALE", "dynamic")
    monkeypatch.setenv("SMP_INIT_SCALE", "64")
    assert ScalingRules.of(SMPConfig.from_options()).begin().scale == 64.0
