"""Scripts with SageMaker's functions against one plain process: losses and weights under each layout."""

import pytest
import torch
from smp_checks import LAYOUTS, MICROBATCHES, assert_same, batches, begin, mine, on_ranks, plain, train_step

import smp_strategy.smp as smp

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# Layouts, with the plain loop that adds in the same order, and the tolerance where it does not.
EXACT = {
    "single": {},
    "pp2": {"parts": MICROBATCHES},
    "sdp2": {"replicas": 2},
    "replicas2": {"replicas": 2},
    "pp2 x replicas2": {"parts": 2, "replicas": 2},
}


def trained(parameters):
    model, optimizer = begin(parameters)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        logits, loss = train_step(model, *mine(batch))
        assert torch.equal(logits.concat(), torch.cat(logits.outputs))
        losses.append(loss.reduce_mean())
        optimizer.step()
    state = model.state_dict()
    mean = torch.stack(losses)
    gathered = smp.allgather(mean, smp.RDP_GROUP)
    return sum(gathered[1:], gathered[0]) / len(gathered), state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_function_trains_as_one_plain_process(layout):
    ranks, parameters = LAYOUTS[layout]
    losses, weights = plain(**EXACT.get(layout, {}))
    tolerance = {} if layout in EXACT else CLOSE
    for found in on_ranks(trained, ranks, parameters):
        torch.testing.assert_close(found[0], losses, **(tolerance or {"rtol": 1e-6, "atol": 1e-7}))
        assert_same(found[1], weights, **tolerance)
