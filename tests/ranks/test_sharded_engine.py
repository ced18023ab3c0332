"""The engine with parameters spread over shard groups: the weights and optimizer state of one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS
from tests.ranks.test_state_sharding import OPTIMIZERS, STEPS, assert_equal, one_process, train

ELEMENTWISE = ["momentum", "loop", "foreach", "fused", "groups"]


def rank(
    name: str,
    kind: str,
    options: dict[str, Any],
    max_norm: float | None = None,
    reduces: bool = False,
    steps: int = STEPS,
) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    norms = train(engine, model, optimizer, name, range(steps), max_norm, reduces)
    kept = sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    )
    state, of_optimizer = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    engine.detach()
    restored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.close()
    return state, of_optimizer, norms, kept, restored


@pytest.mark.daily
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_two_ranks_have_the_weights_and_state_of_one_process(kind):
    ranks = run_ranks(rank, 2, "text", kind, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2})
    weights, state, _ = one_process("text", OPTIMIZERS[kind], 2, 1)
    assert_equal(ranks[0][0], weights)
    assert_equal(ranks[0][1], state)
    for *_, restored in ranks:
        assert_equal(restored, weights)


@pytest.mark.parametrize("degree", [2, 4])
def test_after_many_steps_not_a_bit_differs(degree):
    options = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": degree}
    weights, state, _ = one_process("gpt2", OPTIMIZERS["fused"], degree, 1, steps=20)
    found = run_ranks(rank, degree, "gpt2", "fused", options, None, True, 20)[0]
    assert_equal(found[0], weights)
    assert_equal(found[1], state)


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


@pytest.mark.dear
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "fused"), ("gpt2, tied", "momentum"), ("forked", "foreach"), ("skips", "groups")]
)
def test_replicas_that_deal_out_their_shards_have_the_weights_and_state_of_one_process(name, kind, pp, reduces):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp, "sharded_data_parallel_degree": 2}
    world = 4 * pp
    ranks = run_ranks(rank, world, name, kind, {**options, "shard_optimizer_state": True}, None, reduces)
    weights, state, _ = one_process(name, OPTIMIZERS[kind], 4, pp, together=2)
    tolerance = 1e-6 if pp > 1 and "tied" in name else 0.0
    assert_equal(ranks[0][0], weights, tolerance=tolerance)
    assert_equal(ranks[0][1], state, tolerance=tolerance)
    for *_, restored in ranks:
        assert_equal(restored, weights, tolerance=tolerance)
    kept = [found[3] for found in ranks]
    plain = [found[3] for found in run_ranks(rank, world, name, kind, options, None, reduces)]
    assert max(kept) < 0.6 * max(plain)


GATHERS = {
    "use": {"sdp_gather": "use"},
    "step": {"sdp_gather": "step"},
    "few live": {"sdp_gather": "use", "sdp_max_live_parameters": 20_000},
    "persistent": {"sdp_param_persistence_threshold": 1000},
    "small buckets": {"sdp_reduce_bucket_size": 999},
}


@pytest.mark.dear
@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("name", ["gpt2", "text", "skips"])
@pytest.mark.parametrize("pp", [1, 2])
def test_when_units_are_gathered_does_not_change_a_bit(name, pp, gather):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp, "sharded_data_parallel_degree": 2}
    other = {**options, **GATHERS[gather]}
    if name == "skips" and pp > 1 and "use" in other.values():
        with pytest.raises(RuntimeError, match="`__bool__` reads a value in a step. With `sdp_gather=use` ranks"):
            run_ranks(rank, 2 * pp, name, "foreach", other)
        return
    expected, found = (run_ranks(rank, 2 * pp, name, "foreach", each)[0] for each in (options, other))
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])


@pytest.mark.dear
def test_gradients_are_clipped_by_their_true_norm():
    options = {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, "microbatches": 1}
    weights, _, norms = one_process("gpt2", OPTIMIZERS["momentum"], 2, 1, 0.5)
    ranks = run_ranks(rank, 4, "gpt2", "momentum", options, 0.5)
    for found in ranks:
        assert found[2] == pytest.approx(norms, rel=1e-6)
    assert_equal(ranks[0][0], weights, tolerance=1e-6)
    dealt_out = {**options, "pipeline_parallel_degree": 1, "shard_optimizer_state": True}
    weights_of_four, _, norms_of_four = one_process("gpt2", OPTIMIZERS["momentum"], 4, 1, 0.5, together=2)
    for found in run_ranks(rank, 4, "gpt2", "momentum", dealt_out, 0.5):
        assert found[2] == pytest.approx(norms_of_four, rel=1e-6)
        assert_equal(found[4], weights_of_four, tolerance=1e-6)
    clipping = {**options, "sdp_gradient_clipping": 0.5}
    assert_equal(run_ranks(rank, 4, "gpt2", "momentum", clipping)[0][0], weights, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["whole matrices", "factored"])
def test_an_optimizer_that_needs_whole_parameters_is_refused(kind):
    with pytest.raises(RuntimeError, match=r"`sharded_data_parallel_degree` \(2\) cuts parameters into pieces, and"):
        run_ranks(rank, 2, "text", kind, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2})


class Scaled(nn.Module):
    """A block with a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(x)


class WithScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def with_state(kind: type[Optimizer], resumed: bool) -> Any:
    """The state of an optimizer that has some before the parameters are cut, beside that of one process."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    plain, model = WithScales(), WithScales()
    theirs, ours = kind(plain.parameters()), kind(model.parameters())
    if resumed:
        plain.loss(batch).backward()
        theirs.step()
        theirs.zero_grad()
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    model.load_state_dict(plain.state_dict())
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, sharded_data_parallel_degree=2))
    for _ in range(2):
        engine.attach(model, [ours])
        plain.loss(batch).backward()
        theirs.step()
        theirs.zero_grad()
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(ours)
        ours.step()
        engine.end_update(ours)
        engine.detach()
    found = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(ours)
    engine.close()
    return found, (plain.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", [Adam, Adagrad])
def test_state_from_before_is_cut_and_put_together_again(kind, resumed):
    found, expected = run_ranks(with_state, 2, kind, resumed)[0]
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])
