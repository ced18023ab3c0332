"""The layer that makes scores for the tokens of a vocabulary, of which each rank has some.

Its result is a split tensor: losses exchange two numbers of each token, and nobody puts the scores together unless
somebody looks at them.
"""

from torch import Tensor

from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor

__all__ = ["VocabParallelHead"]


class VocabParallelHead(ColumnParallelLinear):
    """A linear layer whose outputs are tokens of a vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        """The scores of all tokens."""
        (lengths,) = self.cuts["weight"].blocks
        return SplitTensor.from_part(super().forward(x), self.group, -1, lengths)
