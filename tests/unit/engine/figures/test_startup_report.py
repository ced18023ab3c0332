"""What the user is shown once."""

import dataclasses

import pytest

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.figures.startup_report import render_batch, render_layout
from tests.unit.reports.explain.test_explanation import partition

DEALT_OUT = {"shard_optimizer_state": True}
SHARDED = {"sharded_data_parallel_degree": 4}


@pytest.mark.parametrize(
    ("pp", "dp", "options", "said"),
    [
        (2, 2, DEALT_OUT, "The state of the optimizers is dealt out over 2 replicas, whole parameters"),
        (2, 1, DEALT_OUT, "`shard_optimizer_state` changes nothing: there is one replica only."),
        (
            2,
            4,
            SHARDED,
            "spread over 4 ranks, with its gradients and the state of its optimizer, and gathered once per",
        ),
        (1, 4, SHARDED | DEALT_OUT, "`shard_optimizer_state` changes nothing: there is one shard group, whose"),
        (1, 8, SHARDED | DEALT_OUT, "2 groups of ranks have one copy each, and deal the state for it out among each"),
        (1, 4, SHARDED, "and gathered for each use (which takes time that is not simulated)."),
        (2, 4, SHARDED | {"sdp_gather": "use"}, "and gathered for each use (which"),
        (1, 8, SHARDED | DEALT_OUT, "2 groups of ranks have one copy each, and deal the state for it out among"),
        (1, 8, SHARDED | {"sdp_gather": "step"}, "once per batch (which takes time that is not simulated); 2 groups"),
    ],
)
def test_the_layout_says_what_is_shared_among_ranks(pp, dp, options, said):
    config = SMPConfig(**options)
    shape = MeshShape(pp=pp, dp=dp, dp_shard=config.sharded_data_parallel_degree)
    assert said in " ".join(render_layout(shape, partition(), config).split())


def test_the_layout_of_a_model_without_units_says_that_nothing_is_spread():
    whole = dataclasses.replace(partition(), units=(), cut_bytes=())
    text = " ".join(render_layout(MeshShape(pp=1, dp=4, dp_shard=4), whole, SMPConfig(**SHARDED)).split())
    assert "`sharded_data_parallel_degree` (4) spreads nothing: the model cannot be cut into units" in text


def test_the_layout_of_replicas_speaks_of_no_shards():
    text = render_layout(MeshShape(pp=2, dp=4), partition(), SMPConfig())
    assert "spread over" not in text
    assert "dealt out" not in text


def test_it_is_said_how_many_samples_a_step_sees():
    assert "sees 8 samples: one replica reads them all." in render_batch(8, MeshShape(pp=2, dp=1))
    assert "sees 16 samples: 2 replicas read 8 each." in render_batch(8, MeshShape(pp=2, dp=2))
