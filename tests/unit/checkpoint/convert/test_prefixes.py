import pytest

from smp_strategy.checkpoint.convert.prefixes import add_prefix, find_prefix, strip_prefix
from smp_strategy.errors import CheckpointError


def test_the_attribute_that_has_all_weights_is_the_prefix():
    assert find_prefix(["model.model.layers.0.weight", "model.model.norm.weight"]) == "model."
    assert find_prefix(["net._orig_mod.a.weight", "net._orig_mod.b"]) == "net._orig_mod."


def test_several_attributes_are_listed():
    with pytest.raises(CheckpointError, match=r"`model\.` \(2\), `loss\.` \(1\).*--prefix model\."):
        find_prefix(["model.a", "model.b", "loss.weight"])


def test_a_prefix_is_taken_away_and_put_in_front():
    weights = {"model.a": 1, "loss.weight": 2}
    assert strip_prefix(weights, "model.") == ({"a": 1}, ["loss.weight"])
    assert add_prefix({"a": 1}, "model.") == {"model.a": 1}
    with pytest.raises(CheckpointError, match=r"begins with `net\.`; there are `model\.a`"):
        strip_prefix(weights, "net.")
