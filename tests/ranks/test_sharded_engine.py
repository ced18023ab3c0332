"""The engine with parameters spread over shard groups: the weights and optimizer state of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS
from tests.ranks.test_state_sharding import OPTIMIZERS, STEPS, assert_equal, one_process, train

ELEMENTWISE = ["momentum", "loop", "foreach", "fused", "groups"]


def rank(name: str, kind: str, options: dict[str, Any], max_norm: float | None = None, reduces: bool = False) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    engine = Engine(SMPConfig(sdp_param_persistence_threshold=0, **options))
    engine.attach(model, [optimizer])
    norms = train(engine, model, optimizer, name, range(STEPS), max_norm, reduces)
    kept = sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    )
    state, of_optimizer = engine.full_state_dict(), engine.full_optimizer_state(optimizer)
    engine.detach()
    restored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.close()
    return state, of_optimizer, norms, kept, restored


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_two_ranks_have_the_weights_and_state_of_one_process(kind):
    ranks = run_ranks(rank, 2, "text", kind, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2})
    weights, state, _ = one_process("text", OPTIMIZERS[kind], 2, 1)
    assert_equal(ranks[0][0], weights)
    assert_equal(ranks[0][1], state)
    for *_, restored in ranks:
        assert_equal(restored, weights)


LAYOUTS = [(1, 4), (1, 2), (2, 2)]


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(("pp", "degree"), LAYOUTS)
@pytest.mark.parametrize(("name", "kind"), [("gpt2", "foreach"), ("gpt2, tied", "momentum"), ("forked", "foreach")])
def test_four_ranks_have_the_weights_and_state_of_one_process(name, kind, pp, degree, reduces):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp, "sharded_data_parallel_degree": degree}
    ranks = run_ranks(rank, 4, name, kind, options, None, reduces)
    weights, state, _ = one_process(name, OPTIMIZERS[kind], 4 // pp, pp, together=degree)
    tolerance = 1e-6 if pp > 1 and "tied" in name else 0.0  # the stages' parts of the tied gradient are added last
    assert_equal(ranks[0][0], weights, tolerance=tolerance)
    assert_equal(ranks[0][1], state, tolerance=tolerance)
    for *_, restored in ranks:
        assert_equal(restored, weights, tolerance=tolerance)
