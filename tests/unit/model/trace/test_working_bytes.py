"""Bytes beside the saved ones, when forward or backward of a call is fullest."""

import pytest

from smp_strategy.model.trace.working_bytes import Kernel, working_bytes

INPUT, WEIGHT, HIDDEN, RESULT, OTHER, OUTPUT = range(6)
# A product, an activation function that saves its result, another product.
PERCEPTRON = [
    Kernel({INPUT: 10, WEIGHT: 500}, {HIDDEN: 40}, {INPUT: 10, WEIGHT: 500}),
    Kernel({HIDDEN: 40}, {RESULT: 40}, {HIDDEN: 40}),
    Kernel({RESULT: 40, OTHER: 300}, {OUTPUT: 7}, {RESULT: 40, OTHER: 300}),
]
SAVED = {INPUT: 10, RESULT: 40}


def test_a_backward_has_the_gradients_of_a_kernel_at_a_time_and_frees_what_it_has_used():
    # The first product is fullest: its input is saved, the gradient of its result is there and two are computed.
    assert working_bytes(PERCEPTRON, {WEIGHT, OTHER}, SAVED, {OUTPUT: 7}) == (10 + 40 + 10 + 500) - 50
    # With a larger second weight the last product is: everything is saved, and its gradient has arrived.
    larger = [*PERCEPTRON[:2], PERCEPTRON[2]._replace(gradients={RESULT: 40, OTHER: 900})]
    assert working_bytes(larger, {WEIGHT, OTHER}, SAVED, {OUTPUT: 7}) == 7 + 40 + 900


def test_frozen_weights_have_no_gradients():
    frozen = [
        PERCEPTRON[0]._replace(gradients={INPUT: 10}),
        PERCEPTRON[1],
        PERCEPTRON[2]._replace(gradients={RESULT: 40}),
    ]
    assert working_bytes(frozen, {WEIGHT, OTHER}, {RESULT: 40}, {OUTPUT: 7}) == 40 + 40 + 40 - 40


def test_a_forward_has_results_until_their_last_use():
    kernels = [
        Kernel({INPUT: 10}, {HIDDEN: 300}, {}),
        Kernel({HIDDEN: 300}, {RESULT: 200}, {}),
        Kernel({RESULT: 200}, {OUTPUT: 100}, {}),
    ]
    assert working_bytes(kernels, set(), {}, {}) == 300 + 200
    # The last one is returned.
    assert working_bytes(kernels[2:], set(), {}, {OUTPUT: 100}) == 100


@pytest.mark.parametrize("weights", [set(), {WEIGHT}])
def test_gradients_of_values_wait_for_the_kernel_that_made_them_and_those_of_weights_for_none(weights):
    kernels = [
        Kernel({INPUT: 1}, {HIDDEN: 1}, {INPUT: 1}),
        Kernel({HIDDEN: 1}, {RESULT: 90}, {HIDDEN: 1}),
        Kernel({RESULT: 90, WEIGHT: 50}, {OUTPUT: 1}, {RESULT: 90, WEIGHT: 50}),
    ]
    waiting = 0 if weights else 50
    # Backward of the last kernel, or of the one before beside the gradient that waits.
    assert working_bytes(kernels, weights, {}, {OUTPUT: 1}) == max(1 + 90 + 50, 90 + waiting + 1)


def test_a_value_that_is_used_twice_has_one_gradient():
    kernels = [
        Kernel({INPUT: 1}, {HIDDEN: 30}, {INPUT: 1}),
        Kernel({HIDDEN: 30}, {RESULT: 5}, {HIDDEN: 30}),
        Kernel({HIDDEN: 30, RESULT: 5}, {OUTPUT: 1}, {HIDDEN: 30, RESULT: 5}),
    ]
    # The second gradient of the hidden value is computed beside the first one, and added to it.
    assert working_bytes(kernels, set(), {}, {OUTPUT: 1}) == 30 + 5 + 30
