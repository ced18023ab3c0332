"""Where the global generators of one stage stand, those of the others stand afterwards."""

import random

import numpy as np
import pytest
import torch

from smp_strategy.distributed.rng_state import drawing_from, global_state
from smp_strategy.engine.hooks.cross_stage import _RANDOM
from smp_strategy.engine.hooks.cross_stage_inference import CrossStageInference
from smp_strategy.model.trace.pytree import flatten_call
from smp_strategy.pipeline.isolation.global_rng import GlobalGenerators

HOST = torch.device("cpu")


def drawn(*generators):
    numbers = [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    return [*numbers, *[torch.rand((), generator=generator).item() for generator in generators]]


@pytest.mark.parametrize("num_draws", [0, 1, 700])  # Python's and numpy's generators keep a second normal number
def test_generators_go_on_from_those_that_have_drawn(num_draws):
    given = torch.Generator()
    sent = []
    with drawing_from(global_state()):
        for _ in range(num_draws):
            drawn(given)
        GlobalGenerators(HOST, lambda states, stages: sent.append((states, stages))).follow([1], ["text", given])
        expected = drawn(given)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        given.manual_seed(5)
        GlobalGenerators(HOST, lambda states, stages: sent[0][0]).follow([1], ["text", given])
        assert drawn(given) == expected
    assert sent[0][1] == [1]


def draws(name, overload_ends):
    """Whether an overload of the operation is marked as drawing random numbers."""
    packet = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    marked = [each for each in overloads if torch.Tag.nondeterministic_seeded in each.tags]
    return any(overload._overloadname.endswith(overload_ends) for overload in marked)


def test_all_operations_that_draw_into_a_tensor_are_known():
    in_place = [name for name in dir(torch.Tensor) if name.endswith("_") and draws(name, "")]
    into_out = [name for name in dir(torch) if draws(name, "out")]
    assert {"normal_", "random_", "geometric_"} <= set(in_place)
    assert {"multinomial", "bernoulli", "randn"} <= set(into_out)
    unknown = [name for name in in_place + into_out if not any(word in name for word in _RANDOM)]
    assert unknown == ["miopen_rnn", "poisson"]  # which have no `out` in Python


@pytest.mark.parametrize(
    ("function", "arguments", "options", "expected"),
    [
        (torch.nn.functional.gumbel_softmax, [torch.ones(3)], {}, True),
        (torch.nn.functional.dropout, [torch.ones(3)], {}, True),
        (torch.nn.functional.dropout, [torch.ones(3)], {"training": False}, False),
        (torch.poisson, [torch.ones(3)], {}, True),
        (torch.nn.functional.scaled_dot_product_attention, [torch.ones(1, 3, 3)] * 3, {"dropout_p": 0.5}, True),
        (torch.nn.functional.scaled_dot_product_attention, [torch.ones(1, 3, 3)] * 3, {}, False),
        (torch.softmax, [torch.ones(3), 0], {}, False),
    ],
)
def test_it_is_foreseen_what_draws(function, arguments, options, expected):
    leaves, structure = flatten_call(tuple(arguments), options)
    before = torch.get_rng_state()
    foreseen = CrossStageInference(HOST).of(function, leaves, structure)
    assert foreseen.random == expected
    assert torch.equal(torch.get_rng_state(), before)
