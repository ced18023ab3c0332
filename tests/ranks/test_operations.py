"""What a device is given to do in a step, counted beside a plain loop: see ``benchmarks/operations.py``.

Ratios are to one plain loop over the same microbatches, and hold for every precision.
"""

import pytest

from benchmarks.operations import CASES, compare

# Most operations and bytes: of one rank, of two stages together with their messages, of a rank with split layers (whose
# weights and gradients are halves), and of a rank with shards or replicas, which gathers and sums.
MOST = {"one": (1.02, 1.001), "pp2": (1.05, 1.01), "tp2": (1.04, 0.78), "dp2": (1.065, 1.14), "sdp2": (1.01, 1.19)}
# The same bytes without sums over ranks and copies of messages, which a peer leaves to its backend.
WITHOUT_MESSAGES = {"dp2": 1.05, "sdp2": 0.85}
PRECISIONS = {"one": ("fp32", "bf16-true", "bf16-true, gradients too", "bf16 on masters"), "pp2": ("fp32", "bf16-true")}
PRECISIONS |= dict.fromkeys(WITHOUT_MESSAGES, ("fp32", "bf16-true"))


@pytest.mark.parametrize("layout", MOST)
def test_a_device_gets_nothing_more_to_do_than_in_a_plain_loop_but_what_ranks_exchange(layout):
    operations, bytes_moved = MOST[layout]
    names = [f"{layout}, {precision}" for precision in PRECISIONS.get(layout, ("bf16-true",))]
    for name, found in compare({name: CASES[name] for name in names}).items():
        assert found.operations <= operations, (name, found.differences())
        assert found.bytes_moved <= bytes_moved, (name, found.differences())
        assert found.without_messages <= WITHOUT_MESSAGES.get(layout, bytes_moved), (name, found.differences())


def test_replicas_and_shards_move_no_more_bytes_than_those_of_pytorch_but_messages():
    for name, found in compare({name: CASES[name] for name in ("dp2, fp32", "sdp2, fp32", "sdp2, bf16-true")}).items():
        _, bytes_of_peer = found.of_peer
        assert found.without_messages <= bytes_of_peer * 1.001, name


def test_recomputation_and_offload_compute_nothing_twice_but_what_they_must():
    names = ("one, checkpointing", "one, offload")
    for name, found in compare({name: CASES[name] for name in names}).items():
        # Checkpoints save empty slots instead of tensors.
        assert found.operations <= 1.07, (name, found.differences())
        assert found.bytes_moved <= 1.001, (name, found.differences())
