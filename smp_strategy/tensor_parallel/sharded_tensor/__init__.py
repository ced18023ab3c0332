"""Tensors of which each rank of a tensor-parallel group has a part."""
