"""What code does to objects is undone."""

import collections
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from smp_strategy.trace.objects import objects_restored


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1
        self.average = self.sum / self.count


def test_objects_of_the_users_classes_are_as_before():
    meter, inside, namespace, array = Meter(), Meter(), SimpleNamespace(step=1), np.zeros(2)
    with objects_restored([meter, {"inner": [inside]}, namespace, array]):
        meter.update(1.0)
        inside.update(2.0)
        namespace.step += 1
        namespace.new = True
        array += 1
    assert vars(meter) == vars(inside) == {"sum": 0.0, "count": 0}
    assert vars(namespace) == {"step": 1}
    assert array.tolist() == [0, 0]


def test_they_are_after_an_error_too():
    meter = Meter()
    with pytest.raises(ZeroDivisionError), objects_restored([meter]):
        meter.update(1 / 0)
    assert meter.count == 0


def test_of_objects_of_libraries_numbers_are():
    logger = logging.Logger("a name")
    handler = logging.NullHandler()
    with objects_restored([logger]):
        logger.setLevel(logging.ERROR)
        logger.parent = handler
    assert logger.level == logging.NOTSET
    assert logger.parent is handler, "what they have made meanwhile stays"


def test_classes_and_circles_are_no_obstacle():
    meter = Meter()
    meter.itself = [meter]
    with objects_restored([Meter, meter, collections.Counter("aa")]):
        meter.update(1.0)
    assert meter.count == 0
