import torch

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.checkpoint.convert.tied import add_tied


def test_names_of_tied_tensors_are_added():
    weight, other = torch.randn(3, 2), torch.randn(3, 2)
    like = {"embed": LazyTensor.of(weight), "body": LazyTensor.of(other), "head": LazyTensor.of(weight)}
    stored = LazyTensor((3, 2), torch.float32, lambda: weight)
    weights = {"head": stored, "body": LazyTensor((3, 2), torch.float32, lambda: other)}
    assert add_tied(weights, like) == ["`embed` was added: it is tied to `head`."]
    assert weights["embed"] is weights["head"]
    assert weights["embed"].memory is not None
    assert weights["embed"].read() is weight
    assert weights["body"].memory is None
    assert add_tied(weights, like) == []
