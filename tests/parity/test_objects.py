"""Units return objects with tensors inside, and take them: distributions, namespaces, mappings, any class."""

import types
from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from .compare import USES, WIDTH, Block, Blocks, Case, check, mean_square, refusal


class Gives(Block):
    """Block whose result is made by a function of the hidden states."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(super().forward(x))


class Actor(nn.Module):
    """A trunk, a unit that returns an object, and a critic; ``use(given, value)`` makes the loss."""

    def __init__(self, make: Any, use: Any) -> None:
        super().__init__()
        self.trunk = Block()
        self.actor = Gives(make)
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.use = use

    def loss(self, batch: Any) -> Tensor:
        h = self.trunk(batch["x"])
        return self.use(self.actor(h), self.critic(h))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"x": torch.randn(8, WIDTH, generator=generator)}


def categorical(h: Tensor) -> Any:
    return distributions.Categorical(logits=h)


def choice(pi: Any, value: Tensor) -> Tensor:
    chosen = torch.zeros(len(value), dtype=torch.int64)
    assert pi.batch_shape == value.shape[:1]
    return -(pi.log_prob(chosen) * value[:, 0]).mean() - 0.01 * pi.entropy().mean() + pi.probs.square().mean()


def normal(h: Tensor) -> Any:
    return distributions.Normal(h, h.exp())


def independent(h: Tensor) -> Any:
    return distributions.Independent(distributions.Normal(h, h.exp()), 1)


def squashed(h: Tensor) -> Any:
    return distributions.TransformedDistribution(
        distributions.Normal(h, torch.ones_like(h), validate_args=True), [distributions.transforms.TanhTransform()]
    )


def mixture(h: Tensor) -> Any:
    return distributions.MixtureSameFamily(
        distributions.Categorical(logits=h), distributions.Normal(h.tanh(), h.exp()), validate_args=False
    )


def density(pi: Any, value: Tensor) -> Tensor:
    return -(pi.log_prob(0.5 * torch.ones(len(value), WIDTH)) * value).mean()


def density_of_scalars(pi: Any, value: Tensor) -> Tensor:
    return -(pi.log_prob(0.5 * torch.ones(len(value))) * value[:, 0]).mean()


def density_of_rows(pi: Any, value: Tensor) -> Tensor:
    return -(pi.log_prob(0.5 * torch.ones(len(value), WIDTH)) * value[:, 0]).mean()


def divergence(pi: Any, value: Tensor) -> Tensor:
    return distributions.kl_divergence(pi, distributions.Normal(torch.zeros(()), torch.ones(()))).mean() + value.mean()


class Box:
    """An object of the user's, with attributes and lists of them."""

    def __init__(self, h: Tensor) -> None:
        self.hidden = h
        self.name = "box"
        self.more = [h.mean(1), {"sum": h.sum(1)}]


class Slots:
    __slots__ = ("__private", "hidden")

    def __init__(self, h: Tensor) -> None:
        self.hidden = h
        self.__private = h.mean(1)

    @property
    def more(self) -> list[Any]:
        return [self.__private, {"sum": self.hidden.sum(1)}]

    name = "box"


def of_box(box: Any, value: Tensor) -> Tensor:
    assert box.name == "box"
    return mean_square(box.hidden) + (box.more[0] * value[:, 0]).mean() + box.more[1]["sum"].mean()


def namespace(h: Tensor) -> Any:
    return types.SimpleNamespace(**vars(Box(h)))


def nested(h: Tensor) -> Any:
    """An object inside of an object inside of a tuple."""
    return types.SimpleNamespace(box=Box(h), size=h.shape), 3


def of_nested(given: Any, value: Tensor) -> Tensor:
    outside, number = given
    assert (number, type(outside.size)) == (3, torch.Size)
    return of_box(outside.box, value)


class Frozen(OrderedDict[str, Any]):
    """Refuses changes, as the configuration of a diffusion model does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_frozen = True

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self, "is_frozen"):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")

    clear = pop = update


class Listed(list[Any]):
    def append(self, item: Any) -> None:
        raise TypeError("frozen")

    extend = append


def frozen(h: Tensor) -> Any:
    return Frozen(hidden=h, more=[h.mean(1)])


def user_dict(h: Tensor) -> Any:
    return UserDict(hidden=h, more=[h.mean(1)])


def proxy(h: Tensor) -> Any:
    return types.MappingProxyType({"hidden": h, "more": [h.mean(1)]})


def listed(h: Tensor) -> Any:
    return UserDict(hidden=h, more=Listed([h.mean(1)]))


def of_mapping(found: Any, value: Tensor) -> Tensor:
    assert list(found) == ["hidden", "more"]
    return mean_square(found["hidden"]) + (found["more"][0] * value[:, 0]).mean()


CASES = {
    name: Case(lambda make=make, use=use: Actor(make, use), differs=USES)
    for name, make, use in [
        ("categorical", categorical, choice),
        ("normal", normal, density),
        ("divergence", normal, divergence),
        ("independent", independent, density_of_rows),
        ("squashed", squashed, density),
        ("mixture", mixture, density_of_scalars),
        ("box", Box, of_box),
        ("slots", Slots, of_box),
        ("namespace", namespace, of_box),
        ("nested", nested, of_nested),
        ("frozen", frozen, of_mapping),
        ("user_dict", user_dict, of_mapping),
        ("proxy", proxy, of_mapping),
        ("listed", listed, of_mapping),
    ]
}


@pytest.mark.parametrize("name", CASES)
def test_a_unit_may_return_an_object(name: str) -> None:
    check(CASES[name], 2)


class OfObjects(Block):
    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return UserDict(hidden=super().forward(given), state=types.SimpleNamespace(total=given))
        given["state"].total = given["state"].total + given["hidden"]
        given["hidden"] = super().forward(given["hidden"])
        given["pi"] = distributions.Normal(given["hidden"], 1.0)
        return given


def objects_as_arguments(net: Any, x: Tensor) -> Tensor:
    """Blocks take them, change them and return them."""
    found = x
    for block in net.blocks:
        before, found = found, block(found)
        assert before is x or before["pi"] is not None
    return mean_square(found["hidden"]) + found["state"].total.mean() - found["pi"].log_prob(x).mean()


STEPS = {"objects": Case(lambda: Blocks(objects_as_arguments, OfObjects), differs=USES)}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_unit_may_take_an_object(name: str, pp: int) -> None:
    check(STEPS[name], pp)


class TakesBox(Block):
    def forward(self, x: Any) -> Any:
        return Box(super().forward(x.hidden if isinstance(x, Box) else x))


def boxes(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return mean_square(x.hidden)


def test_an_object_of_any_class_as_an_argument_is_refused_by_name() -> None:
    case = Case(lambda: Blocks(boxes, TakesBox))
    assert "meets a placed tensor, which came there in an object or an attribute" in refusal(case)


class Once(dict[str, Any]):
    """A registry that refuses a second entry of the same name, and does not give back any."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self:
            raise KeyError(name)
        super().__setitem__(name, value)

    def _refuse(self, *args: Any) -> None:
        raise TypeError("only by name")

    __delitem__ = pop = update = clear = _refuse

    def forget(self) -> None:
        dict.clear(self)


class Entries(list[Any]):
    """A list that can only be appended to."""

    def _refuse(self, *args: Any) -> None:
        raise TypeError("only by `append`")

    extend = clear = pop = insert = __setitem__ = __delitem__ = _refuse

    def forget(self) -> None:
        list.clear(self)


class Registered(Actor):
    """Keeps features in containers that refuse most changes, and has a configuration that refuses all."""

    def __init__(self) -> None:
        super().__init__(Box, of_box)
        self.config = Frozen(width=WIDTH)
        self.proxy = types.MappingProxyType({"width": WIDTH})
        self.once, self.entries = Once(), Entries()

    def loss(self, batch: Any) -> Tensor:
        assert self.config["width"] == self.proxy["width"] == WIDTH
        h = self.trunk(batch["x"])
        self.once["first"] = h
        self.entries.append(h * 2)
        loss = self.use(self.actor(h), self.critic(h))
        loss = loss + self.once["first"].mean() + self.entries[-1].square().mean()
        self.once.forget()
        self.entries.forget()
        return loss


def test_containers_that_refuse_changes_are_put_back_all_the_same() -> None:
    check(Case(Registered, differs=USES), 2)
