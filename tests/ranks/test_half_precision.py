"""Half precision on float32 weights, in every layout: the weights and state of one process that casts by hand."""

from typing import Any

import pytest
import torch

from smp_strategy.testing import run_ranks
from tests.ranks.half_precision import HALVES, half_rank, one_half_process, weights_each_way
from tests.ranks.test_state_sharding import assert_equal

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"pipeline_parallel_degree": 1, "microbatches": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 3}),
    "pp4, 1f1b": (4, {"pipeline_parallel_degree": 4, "microbatches": 4, "pipeline": "1f1b"}),
    "pp2, zero bubble": (2, {"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": "zb-h1"}),
    "sdp2": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "microbatches": 2}),
    "sdp2, step": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "sdp_gather": "step"}),
    "sdp2, small stay": (
        2,
        {
            "pipeline_parallel_degree": 1,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 100,
        },
    ),
    "pp2 sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, "microbatches": 2}),
    "pp2 sdp2, use": (
        4,
        {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, "microbatches": 2, "sdp_gather": "use"},
    ),
    "mics 2x2": (4, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}),
    "mics 2x2, dealt out": (
        4,
        {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
    ),
    "zero1": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True, "microbatches": 2}),
    "pp2 zero1": (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True, "microbatches": 2}),
}


def expected_of(name: str, kind: str, precision: str, layout: str, units: Any, max_norm: float | None = None) -> Any:
    world, options = LAYOUTS[layout]
    replicas = world // options["pipeline_parallel_degree"]
    together = options.get("sharded_data_parallel_degree", replicas)
    sizes = replicas, options.get("microbatches", 1)
    return one_half_process(name, kind, units, HALVES[precision], sizes, together, max_norm)


# A weight that is tied over stages, or whose pieces lie on several ranks, is where layouts differ by the model.
TIED = ("one rank", "pp2", "pp4, 1f1b", "sdp2", "pp2 sdp2, use", "mics 2x2, dealt out")


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [
        *(("text", "foreach", layout) for layout in LAYOUTS),
        *(("gpt2, tied", "momentum", layout) for layout in TIED),
    ],
)
def test_every_layout_has_the_weights_and_state_of_one_process_that_casts_by_hand(layout, name, kind):
    world, options = LAYOUTS[layout]
    ranks = run_ranks(half_rank, world, name, kind, {**options, "bf16": True})
    weights, state, _ = expected_of(name, kind, "bf16", layout, ranks[0][4])
    # The stages' parts of a tied gradient are added last.
    tolerance = 1e-6 if "tied" in name and options["pipeline_parallel_degree"] > 1 else 0.0
    assert {tensor.dtype for tensor in ranks[0][0].values()} == {torch.float32}
    assert_equal(ranks[0][0], weights, tolerance=tolerance)
    assert_equal(ranks[0][1], state, tolerance=tolerance)
    for *_, restored, _ in ranks:
        assert_equal(restored, weights, tolerance=tolerance)


@pytest.mark.parametrize(("layout", "precision"), [("pp2 sdp2", "fp16"), ("sdp2", "bf16")])
def test_clipping_goes_by_the_norm_of_float32_gradients(layout, precision):
    world, options = LAYOUTS[layout]
    ranks = run_ranks(half_rank, world, "gpt2", "momentum", {**options, precision: True}, 0.5)
    weights, _, norms = expected_of("gpt2", "momentum", precision, layout, ranks[0][4], 0.5)
    for found in ranks:
        assert found[2] == pytest.approx(norms, rel=1e-6)
    assert_equal(ranks[0][0], weights, tolerance=1e-6)


@pytest.mark.parametrize("layout", ["pp2", "pp2 sdp2", "zero1", "mics 2x2, dealt out"])
def test_parameters_of_half_precision_add_up_their_gradients_in_float32(layout):
    world, options = LAYOUTS[layout]
    ranks = run_ranks(half_rank, world, "gpt2", "momentum", {**options, "fp16_params": True})
    replicas = world // options["pipeline_parallel_degree"]
    together = options.get("sharded_data_parallel_degree", replicas)
    sizes = replicas, options.get("microbatches", 1)
    weights, _, _ = one_half_process(
        "gpt2", "momentum", ranks[0][4], torch.float16, sizes, together, without_masters=True
    )
    assert {tensor.dtype for tensor in ranks[0][0].values()} == {torch.float16}
    assert_equal(ranks[0][0], weights)
    for *_, restored, _ in ranks:
        assert_equal(restored, weights)


@pytest.mark.parametrize("layout", ["one rank", "pp2, zero bubble", "pp2 sdp2", "zero1"])
def test_gradients_of_half_precision_can_be_added_up_as_pytorch_does(layout):
    world, options = LAYOUTS[layout]
    options = {**options, "fp16_params": True, "gradient_dtype": "parameter", "microbatches": 4}
    found = run_ranks(half_rank, world, "gpt2", "momentum", options)[0]
    sizes = world // options["pipeline_parallel_degree"], 4
    plain, wide = (
        one_half_process(*("gpt2", "momentum", found[4], torch.float16, sizes), without_masters=True, sums_in=dtype)[0]
        for dtype in (torch.float16, torch.float32)
    )
    # Shards are divided by the number of ranks before they are summed: of tiny numbers the last digit differs.
    assert_equal(found[0], plain, tolerance=1e-3 if "sdp2" in layout else 0.0)
    assert any(not torch.equal(plain[name], wide[name]) for name in plain)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("sdp2", "bf16"), ("sdp2", None), ("zero1", "bf16"), ("zero1", None), ("mics 2x2", None), ("pp2 sdp2", "bf16")],
)
def test_sums_over_ranks_travel_in_the_dtype_that_is_asked_for(layout, precision):
    world, options = LAYOUTS[layout]
    precise = {**options, precision: True} if precision else options
    ways = [precise, {**precise, "reduce_dtype": "float32"}, {**precise, "reduce_dtype": "bfloat16"}]
    expected, same, found = run_ranks(weights_each_way, world, "text", ways)[0]
    assert_equal(same, expected)
    assert any(not torch.equal(found[name], expected[name]) for name in expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=0.02)
