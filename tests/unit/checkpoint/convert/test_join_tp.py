import pytest
import torch

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.checkpoint.convert.read_sagemaker import cut_dim, flat_weights, join_parts, shapes_in, union
from smp_strategy.errors import CheckpointError


def lazy(**tensors):
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def test_the_dimension_that_was_cut_is_the_one_that_differs():
    assert cut_dim([(2, 3), (2, 3)], (4, 3)) == 0
    assert cut_dim([(2, 3), (2, 4)], (2, 7)) == 1
    assert cut_dim([(2, 3), (2, 3)], (2, 3)) is None
    for whole in [(4, 6), (5, 3), (2, 3, 2), (6,)]:
        with pytest.raises(ValueError, match="do not make"):
            cut_dim([(2, 3), (2, 3)], whole)


def test_parts_are_joined_where_the_whole_shape_says_so():
    whole = torch.randn(4, 6)
    norm = torch.ones(6)
    parts = [lazy(w=half, v=other, n=norm) for half, other in zip(whole.chunk(2, 0), whole.chunk(2, 1), strict=True)]
    found = join_parts(parts, {"w": (4, 6), "v": (4, 6), "n": (6,)}, "here")
    assert found["w"].shape == (4, 6)
    assert found["w"].read().equal(whole)
    assert found["v"].read().equal(whole)
    assert found["n"].read().equal(norm)


def test_parts_that_are_alike_are_still_parts_where_the_whole_shape_says_so():
    parts = [lazy(bias=torch.zeros(2)), lazy(bias=torch.zeros(2))]
    assert join_parts(parts, {"bias": (4,)}, "here")["bias"].read().equal(torch.zeros(4))


def test_without_whole_shapes_parts_must_be_alike():
    alike = [lazy(w=torch.ones(2)), lazy(w=torch.ones(2))]
    assert join_parts(alike, None, "here")["w"].shape == (2,)
    with pytest.raises(CheckpointError, match="--like"):
        join_parts([lazy(w=torch.ones(2)), lazy(w=torch.zeros(2))], None, "here")


def test_whole_tensors_that_differ_are_refused():
    parts = [lazy(w=torch.ones(2)), lazy(w=torch.zeros(2))]
    with pytest.raises(CheckpointError, match="they differ"):
        join_parts(parts, {"w": (2,)}, "here")
    with pytest.raises(CheckpointError, match="another model"):
        join_parts(parts, {}, "here")
    with pytest.raises(CheckpointError, match="do not fit"):
        join_parts(parts, {"w": (3,)}, "here")
    with pytest.raises(CheckpointError, match="of 1 tensor parallel ranks, not of 2"):
        join_parts([parts[0], {}], None, "here")


def test_stages_may_share_equal_tensors_only():
    shared = torch.randn(2)
    assert list(union([lazy(a=shared), lazy(a=shared.clone(), b=shared)], "here")) == ["a", "b"]
    with pytest.raises(CheckpointError, match="two different tensors for `a`"):
        union([lazy(a=shared), lazy(a=shared + 1)], "here")


def flat_files(parameters, num_files):
    """As DeepSpeed's stage 3 lays them out, from which SageMaker's library comes."""
    files = [[] for _ in range(num_files)]
    for tensor in parameters.values():
        length = -(-tensor.numel() // num_files)
        padded = torch.cat([tensor.reshape(-1), torch.full((length * num_files - tensor.numel(),), torch.nan)])
        for file, piece in zip(files, padded.split(length), strict=True):
            file.append(piece)
    return [torch.cat(file) for file in files]


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_parameters_come_out_of_flat_groups(num_files):
    parameters = {"a": torch.randn(5), "b": torch.randn(2, 3), "c": torch.randn(()), "d": torch.randn(7, 1)}
    shapes = {name: tensor.shape for name, tensor in parameters.items()}
    files = [LazyTensor.of(file) for file in flat_files(parameters, num_files)]
    found = flat_weights(files, shapes_in([dict(list(shapes.items())[:2]), dict(list(shapes.items())[2:])], ""), "here")
    assert all(found[name].read().equal(parameters[name]) for name in parameters)
    in_groups = [[LazyTensor.of(part) for part in file.read().split(3)] for file in files]
    found = flat_weights(in_groups, shapes, "here")
    assert all(found[name].read().equal(parameters[name]) for name in parameters)


def test_flat_groups_of_another_size_are_refused():
    files = [LazyTensor.of(torch.zeros(4)), LazyTensor.of(torch.zeros(4))]
    with pytest.raises(CheckpointError, match="has 4 elements, but .* makes it 3"):
        flat_weights(files, {"a": (5,)}, "here")
    with pytest.raises(CheckpointError, match="no list of tensors"):
        flat_weights([3], {"a": (5,)}, "here")
    with pytest.raises(CheckpointError, match="names and shapes"):
        shapes_in({"a": "x"}, "here")
