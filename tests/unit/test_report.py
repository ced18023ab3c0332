"""What the user is shown once."""

import pytest

from smp_strategy.mesh_shape import MeshShape
from smp_strategy.report import render_layout
from tests.unit.explain.test_explanation import partition


@pytest.mark.parametrize(
    ("shape", "shards_state", "said"),
    [
        (MeshShape(pp=2, dp=2), True, "The state of the optimizers is dealt out over 2 replicas, whole parameters"),
        (MeshShape(pp=2, dp=1), True, "`shard_optimizer_state` changes nothing: there is one replica only."),
        (MeshShape(pp=2, dp=4, dp_shard=4), False, "spread over 4 ranks, with its gradients and the state"),
    ],
)
def test_the_layout_says_what_is_shared_among_ranks(shape, shards_state, said):
    text = " ".join(render_layout(shape, partition(), shards_state=shards_state).split())
    assert said in text
    assert "spread over" not in render_layout(MeshShape(pp=2, dp=4), partition())
