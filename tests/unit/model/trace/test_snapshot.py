"""Snapshots restore objects, containers and generators; iterators give their items again."""

import collections
import itertools
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from smp_strategy.model.trace.snapshot import Snapshot, contents_of, fill
from smp_strategy.model.trace.undo_variables import iterators_rewound


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1
        self.average = self.sum / self.count


def test_objects_of_the_users_classes_are_as_before():
    meter, inside, namespace, array = Meter(), Meter(), SimpleNamespace(step=1), np.zeros(2)
    with Snapshot(objects=[meter, {"inner": [inside]}, namespace, array]):
        meter.update(1.0)
        inside.update(2.0)
        namespace.step += 1
        namespace.new = True
        array += 1
    assert vars(meter) == vars(inside) == {"sum": 0.0, "count": 0}
    assert vars(namespace) == {"step": 1}
    assert array.tolist() == [0, 0]


def test_lists_dicts_and_sets_in_them_are_as_before():
    namespace = SimpleNamespace(values=[1.0], by_name={"a": [0]}, seen={1}, latest=collections.deque([1], maxlen=2))
    with Snapshot(objects=[{"inner": namespace}]):
        namespace.values.append(2.0)
        namespace.by_name["a"].append(1)
        namespace.by_name["b"] = []
        namespace.seen.add(2)
        namespace.latest.append(2)
        namespace.latest.append(3)
    assert namespace.values == [1.0]
    assert namespace.by_name == {"a": [0]}
    assert namespace.seen == {1}
    assert namespace.latest == collections.deque([1], maxlen=2)


def test_they_are_after_an_error_too():
    meter = Meter()
    with pytest.raises(ZeroDivisionError), Snapshot(objects=[meter]):
        meter.update(1 / 0)
    assert meter.count == 0


def test_of_objects_of_libraries_numbers_are():
    logger = logging.Logger("a name")
    handler = logging.NullHandler()
    with Snapshot(objects=[logger]):
        logger.setLevel(logging.ERROR)
        logger.parent = handler
    assert logger.level == logging.NOTSET
    assert logger.parent is handler, "what they have made meanwhile stays"


def test_classes_and_circles_are_no_obstacle():
    meter = Meter()
    meter.itself = [meter]
    with Snapshot(objects=[Meter, meter, collections.Counter("aa")]):
        meter.update(1.0)
    assert meter.count == 0


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda generator: torch.rand((), generator=generator).item()),
        (lambda: np.random.default_rng(1), lambda generator: generator.random()),
        (lambda: np.random.Generator(np.random.MT19937(1)), lambda generator: generator.random()),
        (lambda: np.random.RandomState(1), lambda generator: generator.rand()),
        (lambda: random.Random(1), lambda generator: generator.random()),
    ],
)
def test_generators_go_on_where_they_were(make, draw):
    expected = make()
    wanted = [draw(expected) for _ in range(3)]
    generator = make()
    found = [draw(generator)]
    with Snapshot(objects=[{"inner": generator}]):
        draw(generator)
        draw(generator)
    assert [*found, draw(generator), draw(generator)] == wanted


def numbers():
    yield from range(1, 10)


@pytest.mark.parametrize(
    "make", [numbers, lambda: iter([1, 2, 3, 4, 5, 6]), lambda: itertools.count(1), lambda: map(abs, range(-1, -9, -1))]
)
def test_iterators_give_once_more_what_they_have_given(make):
    holder = {"it": make(), "other": 1}
    found = [next(holder["it"])]
    for _ in range(2):
        with iterators_rewound([holder]):
            assert next(holder["it"]) == 2
            assert next(holder["it"]) == 3
    found += [next(holder["it"]) for _ in range(2)]
    with iterators_rewound([holder]):
        next(holder["it"])
    assert [*found, *itertools.islice(holder["it"], 2)] == [1, 2, 3, 4, 5]


def test_an_iterator_that_nobody_has_asked_is_itself_again():
    holder = {"it": numbers()}
    before = holder["it"]
    with iterators_rewound([holder]):
        assert holder["it"].gi_frame is before.gi_frame, "in all else it is that iterator"
    assert holder["it"] is before


def test_an_iterator_ends_when_it_ended():
    holder = {"it": iter([1, 2])}
    with iterators_rewound([holder]):
        assert list(holder["it"]) == [1, 2]
    assert list(holder["it"]) == [1, 2]
    assert list(holder["it"]) == []


def test_dicts_get_back_their_order_and_the_same_container_stays():
    names = {"a": 1, "b": 2}
    with Snapshot(containers=[names]) as snapshot:
        names["c"] = names.pop("a")
        with snapshot.of_now():
            names.clear()
        assert names == {"b": 2, "c": 1}
    assert list(names.items()) == [("a", 1), ("b", 2)]


def test_ignored_names_are_neither_captured_nor_restored():
    module = torch.nn.Linear(1, 1)
    module.calls = 0
    snapshot = Snapshot()
    snapshot.add(vars(module), ignored={"training"})
    module.calls, module.late = 1, True
    module.eval()
    snapshot.restore()
    assert module.calls == 0
    assert not hasattr(module, "late")
    assert not module.training


def test_captured_values_may_be_replaced_as_they_are_restored():
    values = [1, 2]
    snapshot = Snapshot(containers=[values])
    values.clear()
    snapshot.restore(lambda value: 10 * value)
    assert values == [10, 20]


def test_nothing_is_written_to_what_is_the_same():
    class Watched(dict):
        def __setitem__(self, key, value):
            raise AssertionError(key)

    watched = Watched(a=[1])
    fill(watched, contents_of(watched))
    assert watched == {"a": [1]}
