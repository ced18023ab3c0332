"""Nobody sees an old value of a parameter whose new value is on its way."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.zero1 import ParameterBroadcast


class Post:
    """Brings ones for ``parameters`` when it is waited for."""

    def __init__(self, arrivals: ParameterBroadcast, *parameters: nn.Parameter) -> None:
        self.times = 0
        self._parameters = parameters
        arrivals.expect(parameters, self._fill)

    def _fill(self) -> None:
        self.times += 1
        for parameter in self._parameters:
            parameter.fill_(1.0)


def zeros() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2))


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "an operation": lambda weight: weight * 1,
    "another operand": lambda weight: torch.ones(2, 2) @ torch.eye(2) * weight,
    "its data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "a list of tensors": lambda weight: torch.stack([weight, weight])[0],
    "deepcopy": copy.deepcopy,
    "pickle": lambda weight: _pickled(weight),
    "linear": lambda weight: nn.functional.linear(torch.eye(2), weight).T,
}


def _pickled(weight: nn.Parameter) -> Tensor:
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    loaded: Tensor = torch.load(buffer)
    return loaded


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_whatever_needs_the_values_waits_for_them(use: Callable[[nn.Parameter], Any]) -> None:
    weight, arrivals = zeros(), ParameterBroadcast()
    post = Post(arrivals, weight)
    assert torch.equal(use(weight), torch.ones(2, 2))
    assert post.times == 1
    assert type(weight) is nn.Parameter
    arrivals.wait()
    assert post.times == 1


def test_metadata_and_gradients_do_not_wait() -> None:
    weight, arrivals = zeros(), ParameterBroadcast()
    post = Post(arrivals, weight)
    assert weight.shape == (2, 2)
    assert weight.requires_grad
    assert weight.is_leaf
    weight.grad = torch.ones(2, 2)
    assert weight.grad is not None
    assert weight in {weight: 1}
    assert isinstance(weight, nn.Parameter)
    assert post.times == 0


def test_a_wait_for_some_leaves_others_under_way() -> None:
    first, second, arrivals = zeros(), zeros(), ParameterBroadcast()
    posts = Post(arrivals, first), Post(arrivals, second)
    arrivals.wait_for([first])
    assert [post.times for post in posts] == [1, 0]
    assert torch.equal(second.detach(), torch.ones(2, 2))
    arrivals.wait()
    assert [post.times for post in posts] == [1, 1]


def test_values_that_travel_together_arrive_together() -> None:
    first, second, arrivals = zeros(), zeros(), ParameterBroadcast()
    post = Post(arrivals, first, second)
    assert first.sum() == 4
    assert type(second) is nn.Parameter
    assert second.sum() == 4
    assert post.times == 1


def test_a_class_of_the_users_is_waited_for_at_once() -> None:
    class Special(nn.Parameter):
        pass

    weight, arrivals = Special(torch.zeros(2, 2)), ParameterBroadcast()
    post = Post(arrivals, weight)
    assert type(weight) is Special
    assert post.times == 1
    arrivals.wait()
    assert post.times == 1


def test_values_that_never_come_are_an_error_at_each_use() -> None:
    weight, arrivals = zeros(), ParameterBroadcast()

    def lost() -> None:
        raise ConnectionError("the other rank is gone")

    arrivals.expect([weight], lost)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            weight.sum()


def test_an_optimizer_skips_what_is_under_way_and_has_no_gradient() -> None:
    weight, mine, arrivals = zeros(), zeros(), ParameterBroadcast()
    optimizer = torch.optim.AdamW([weight, mine], lr=0.1)
    post = Post(arrivals, weight)
    mine.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.zero_grad()
    assert post.times == 0
    assert list(optimizer.state) == [mine]


def test_values_arrive_also_in_inference_mode_as_ordinary_ones() -> None:
    weight, arrivals = zeros(), ParameterBroadcast()
    Post(arrivals, weight)
    with torch.inference_mode():
        assert weight.sum() == 4
    (weight * 2).sum().backward()
    assert weight.grad is not None
