import copy

import pytest
from torch import nn

import smp_strategy
from smp_strategy.errors import ConfigError
from smp_strategy.tensor_parallel.plan.user_choices import disabled, set_tensor_parallelism, tensor_parallelism


def off(module):
    return set(disabled(dict(module.named_modules(remove_duplicate=False))))


def pair():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_everything_is_enabled_unless_something_is_said():
    assert off(pair()) == set()


def test_a_disabled_module_is_so_with_all_that_it_holds():
    net = nn.ModuleDict({"a": pair(), "b": pair()})
    assert smp_strategy.set_tensor_parallelism(net["a"], False) is net["a"]
    assert off(net) == {"a", "a.0", "a.1"}
    set_tensor_parallelism(net["a"][1])
    assert off(net) == {"a", "a.0"}


def test_where_a_module_is_enabled_by_hand_only_that_is():
    net = nn.ModuleDict({"a": pair(), "b": pair()})
    set_tensor_parallelism(net["a"])
    assert off(net) == {"", "b", "b.0", "b.1"}


def test_modules_created_in_a_context_are_noted_and_the_innermost_wins():
    with tensor_parallelism():
        a = nn.Linear(2, 2)
        with smp_strategy.tensor_parallelism(False):
            b = nn.Linear(2, 2)
        c = nn.Linear(2, 2)
    net = nn.Sequential(a, b, c, nn.Linear(2, 2))
    assert off(net) == {"", "1", "3"}


def test_modules_without_a_note_follow_the_one_that_holds_them():
    net = nn.ModuleDict({"a": pair()})
    set_tensor_parallelism(net["a"], False)
    net["a"].append(nn.Linear(2, 2))
    assert "a.2" in off(net)


def test_copies_keep_their_notes():
    assert off(copy.deepcopy(set_tensor_parallelism(pair(), False))) == {"", "0", "1"}


@pytest.mark.parametrize("enabled", [1, None, "yes"])
def test_anything_but_true_or_false_is_refused(enabled):
    with pytest.raises(ConfigError, match="`enabled` must be true or false"):
        set_tensor_parallelism(nn.Linear(2, 2), enabled)
    with pytest.raises(ConfigError, match="`enabled` must be true or false"), tensor_parallelism(enabled):
        pass
