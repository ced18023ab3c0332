"""What a step sets for a while is found by the microbatch that has set it, and by no other; counts go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .compare import GLUE, REUSED, WIDTH, Blocks, Case, check, mean_square

SCALE = 1.0
OPTIONS = SimpleNamespace(power=1)
NAMED = {"sign": 1.0}


class Switched(nn.Module):
    """Computes with whatever can be switched."""

    bias = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, bias=False)
        self.adapt = True
        self.factor = 1.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.base(x)
        if self.adapt:
            y = y + self.low(x)
        y = y * self.factor * SCALE * NAMED["sign"] + self.bias
        return torch.tanh(y * (1.0 if self.training else 0.5)) ** OPTIONS.power


class Net(Blocks):
    """Four such blocks, and what a step may use to note something."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], block: Callable[[], nn.Module] = Switched) -> None:
        super().__init__(step, block)
        self.use = "policy"
        self.count = 0
        self.mode = ""
        self.level = 0.0
        self.options = {"scale": 1.0}

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x * (1.0 if self.use == "policy" else 2.0) * self.options["scale"]
        return x + self.offset.detach() + torch.full((WIDTH,), 0.1)  # of the default dtype

    def get_extra_state(self) -> Any:
        return torch.tensor([self.count, self.level, len(self.use), *map(ord, self.mode[-1:])])

    def set_extra_state(self, state: Any) -> None:
        pass


def compared(switched: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A step: the policy, the reference without gradients inside of ``switched``, and the policy again."""

    def step(net: Any, x: Tensor) -> Tensor:
        policy = net.body(x)
        with torch.no_grad(), switched(net):
            reference = net.body(x)
        with torch.no_grad():
            again = net.body(x + 1)
        return mean_square(policy - reference * 0.5 + again * 0.1)

    return step


@contextmanager
def flag(net: Any) -> Iterator[None]:
    for block in net.blocks:
        block.adapt = False
    yield
    for block in net.blocks:
        block.adapt = True


@contextmanager
def name(net: Any) -> Iterator[None]:
    net.use = "reference"
    yield
    net.use = "policy"


@contextmanager
def evaluation(net: Any) -> Iterator[None]:
    net.eval()
    yield
    net.train()


@contextmanager
def number(net: Any) -> Iterator[None]:
    before = [block.factor for block in net.blocks]
    for place, block in enumerate(net.blocks):
        block.factor = 0.5 + place
    try:
        yield
    finally:
        for block, factor in zip(net.blocks, before, strict=True):
            block.factor = factor


@contextmanager
def entry(net: Any) -> Iterator[None]:
    before = net.options.pop("scale")
    net.options["scale"] = before * 3
    yield
    net.options.update(scale=before)


@contextmanager
def part(net: Any) -> Iterator[None]:
    for block in net.blocks:
        block.base.forward = torch.sin
    yield
    for block in net.blocks:
        del block.base.forward


@contextmanager
def unit(net: Any) -> Iterator[None]:
    block, forward = net.blocks[1], net.blocks[1].forward
    block.forward = lambda x: forward(x) * 2
    try:
        yield
    finally:
        block.forward = forward


@contextmanager
def variable(net: Any) -> Iterator[None]:
    global SCALE
    before, SCALE = SCALE, 0.25
    try:
        yield
    finally:
        SCALE = before


@contextmanager
def an_object(net: Any) -> Iterator[None]:
    OPTIONS.power = 3
    yield
    OPTIONS.power = 1


@contextmanager
def an_entry_of_a_global(net: Any) -> Iterator[None]:
    NAMED["sign"] = -1.0
    yield
    NAMED["sign"] = 1.0


@contextmanager
def a_class(net: Any) -> Iterator[None]:
    Switched.bias = 0.5
    yield
    Switched.bias = 0.0


class Default:
    """A setting of PyTorch's."""

    def __init__(self, net: Any) -> None:
        pass

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(torch.float32)


@contextmanager
def several(net: Any) -> Iterator[None]:
    with flag(net), variable(net):
        net.body(torch.ones(1, WIDTH))
        with evaluation(net), number(net):
            yield


@contextmanager
def left_by_an_error(net: Any) -> Iterator[None]:
    with suppress(KeyError), number(net), variable(net):
        net.seen.append(len(net.body(torch.ones(2, WIDTH))))
        raise KeyError
    yield


def around() -> Callable[[Any], Any]:
    """Switches a variable of a closure, by which a method of the net goes."""
    is_on = False

    def body(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x) * (3.0 if is_on else 1.0)
        return x

    def step(net: Any, x: Tensor) -> Tensor:
        nonlocal is_on
        policy = body(net, x)
        is_on = True
        with torch.no_grad():
            reference = body(net, x)
        is_on = False
        return mean_square(policy - reference)

    return step


def frozen(net: Any, x: Tensor) -> Tensor:
    """Half of the weights is frozen in the first pass, with gradients."""
    for block in net.blocks:
        block.base.requires_grad_(False)
    first = net.body(x)
    for block in net.blocks:
        block.base.requires_grad_(True)
        block.low.weight.requires_grad = False
    second = net.body(x * 0.5)
    for block in net.blocks:
        block.low.weight.requires_grad = True
    return mean_square(first - second)


def never_put_back(net: Any, x: Tensor) -> Tensor:
    """A mode is set whenever it is needed."""
    net.use = "policy"
    first = net.body(x)
    net.use = "reference"
    with torch.no_grad():
        second = net.body(x)
    net.mode = net.use
    return mean_square(first - second)


def counted(net: Any, x: Tensor) -> Tensor:
    """A count that goes on from microbatch to microbatch is used after a pause; another goes on in between."""
    net.count += 1
    y = net.body(x) * net.count
    for block in net.blocks:
        y = block(y)
        net.level += 0.5
    return mean_square(y)


class Doubled(nn.Module):
    """Makes a weight out of another."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.sigmoid() * 2


class Parametrized(nn.Module):
    """A block whose weight is made anew at every call, unless it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def kept_weights(net: Any, x: Tensor) -> Tensor:
    """Made once for two passes, and once more for a third."""
    with parametrize.cached():
        y = net.body(net.body(x))
    with parametrize.cached():
        with parametrize.cached():
            y = net.body(y)
        y = y + net.blocks[0](y)
    return mean_square(y)


def late(switched: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Only some microbatches of the second step switch, and the step has not done it before."""

    def step(net: Any, x: Tensor) -> Tensor:
        net.count += 1
        if net.count not in (5, 6, 8):
            return mean_square(net.body(x))
        return compared(switched)(net, x)

    return step


def late_count(net: Any, x: Tensor) -> Tensor:
    """What is counted only now and then."""
    net.count += 1
    if net.count in (2, 3, 4, 7):
        net.level += 0.5
        net.mode = f"since {net.count}"
    return mean_square(net.body(x))


def steps(*, makers: Any) -> dict[str, Case]:
    return {each.__name__: Case(lambda each=each: Net(compared(each))) for each in makers}


SWITCHES = (
    *(flag, name, evaluation, number, entry, part, unit, variable, an_object, an_entry_of_a_global, a_class),
    *(Default, several, left_by_an_error),
)
CASES = {
    **steps(makers=SWITCHES),
    "a variable of a closure": Case(lambda: Net(around())),
    "late flag": Case(lambda: Net(late(flag))),
    "late evaluation": Case(lambda: Net(late(evaluation))),
    **{each.__name__: Case(lambda each=each: Net(each), differs=REUSED) for each in (frozen, counted)},
    "kept weights": Case(lambda: Net(kept_weights, Parametrized), differs=REUSED),
    **{each.__name__: Case(lambda each=each: Net(each)) for each in (never_put_back, late_count)},
}
SCHEDULES = {
    "1f1b": {"pipeline": "1f1b"},
    "interleaved": {"pipeline": "interleaved"},
    "zb-h1": {"pipeline": "zb-h1"},
    "unseen": {"skip_tracing": True},
}


# Stages have two chunks each, so that microbatches meet in the midst of a pass.
CHUNKS = {"pipeline": "1f1b", "virtual_pipeline_degree": 2}


@pytest.mark.parametrize("case", CASES)
def test_every_microbatch_finds_what_it_has_set_itself(case):
    check(replace(CASES[case], options=CHUNKS), 2, (6,))


@pytest.mark.parametrize("pp", [2, 4])
def test_kept_weights_are_made_once(pp):
    """A spectral norm goes on with its iteration whenever the weight is made, also where a pass waits in between."""
    case = Case(lambda: Net(kept_weights, lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))
    check(replace(case, differs=GLUE), pp, (1,))


@pytest.mark.dear
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_every_schedule(schedule):
    for case in ("several", "counted", "kept weights"):
        check(replace(CASES[case], options=SCHEDULES[schedule], differs=REUSED), 4, (4,))


@pytest.mark.parametrize("switched", [variable, flag, an_object])
def test_what_is_computed_again_finds_what_it_has_found(switched):
    """In backward, when the step has put it back."""

    def step(net: Any, x: Tensor) -> Tensor:
        with switched(net):
            x = net.body(x)
        return mean_square(x)

    check(Case(lambda: Net(step), options={"activation_checkpointing": "all"}), 2, (1, 4))
