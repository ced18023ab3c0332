"""Manual partitions, from names and stages alone."""

import pytest

from smp_strategy.errors import ConfigError
from smp_strategy.planning.partition.user_partition import ByHand

UNITS = ["embed", "blocks.0", "blocks.1", "blocks.1x", "head"]


def place(stages, default=None, num_stages=2):
    return list(ByHand(stages, default).place(UNITS, num_stages).values())


@pytest.mark.parametrize(
    ("stages", "default", "expected"),
    [
        ({"": 0, "blocks": 1}, None, [0, 1, 1, 1, 0]),
        ({"blocks": 1}, 0, [0, 1, 1, 1, 0]),
        ({"": 1, "blocks": 0, "blocks.1": 1}, None, [1, 0, 1, 0, 1]),
        ({"": 1, "blocks.1": 0}, 0, [1, 1, 0, 1, 1]),
    ],
)
def test_a_unit_is_on_the_stage_of_the_nearest_module_that_has_one(stages, default, expected):
    assert place(stages, default) == expected


def refusal(*arguments) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        place(*arguments)
    return caught.value.problems


def test_units_that_nobody_placed_are_named():
    assert refusal({"head": 1, "embed": 0}) == (
        "`auto_partition` is False, and nobody has placed `blocks.0`, `blocks.1`, `blocks.1x`. Place what is left with "
        "`smp_strategy.set_partition(module, stage)`, or give `default_partition`.",
    )
    assert "placed `embed`, `blocks.0`, `blocks.1` and 2 more." in refusal({})[0]


def test_a_stage_that_does_not_exist_is_named():
    assert refusal({"": 0, "head": 3, "blocks": 1}) == (
        "`head` is placed on stage 3, but with 2 stages these are numbered 0 to 1. Choose one of them, or another "
        "`pipeline_parallel_degree`.",
    )


def test_a_stage_without_a_unit_is_named():
    assert refusal({"": 0, "head": 3}, None, 4) == (
        "No unit is on stage 1, 2. Place one of `embed`, `blocks.0`, `blocks.1` and 2 more there, or choose a smaller "
        "`pipeline_parallel_degree`.",
    )


def test_the_outermost_placed_modules_say_what_was_meant():
    stages = {"blocks": 0, "blocks.0": 0, "blocks.0.mlp": 1, "head": 1}
    assert ByHand(stages).outermost() == ["blocks", "head"]
    assert ByHand({"": 0, **stages}).outermost() == ["the model"]


def test_a_model_that_cannot_be_cut_leaves_nothing_to_place():
    assert ByHand({}).place([], 1) == {}
    with pytest.raises(ConfigError, match="No unit is on stage 0, 1, because the model cannot be cut into units. Set "):
        ByHand({}).place([], 2)
