"""Layout of a job: its degrees of parallelism, microbatches and recomputation; and all layouts that fill a cluster.

A batch of all ranks (``global_batch`` samples) is cut into ``dp * microbatches`` equal microbatches.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.planning.layouts.cluster import Cluster

__all__ = ["JobLayout", "divisors", "layouts_on"]

# Beyond this many samples in a microbatch kernels are large anyway, and activations only grow.
MOST_SAMPLES = 16


class JobLayout(NamedTuple):
    """Degrees of parallelism with the microbatches of a step."""

    pp: int
    """Pipeline stages."""
    tp: int
    """Ranks over which a layer is split."""
    dp_shard: int
    """Replicas of a shard group, which share parameters, gradients and optimizer state."""
    dp_replicate: int
    """Shard groups, or replicas if nothing is sharded."""
    microbatches: int
    """Microbatches of a replica's batch."""
    samples: int
    """Samples of a microbatch."""
    recomputes: bool = False
    """Whether units compute their activations again (`activation_checkpointing=all`)."""

    @property
    def dp(self) -> int:
        """Replicas that read samples of their own."""
        return self.dp_shard * self.dp_replicate

    @property
    def global_batch(self) -> int:
        """Samples of a step of all replicas."""
        return self.dp * self.microbatches * self.samples

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.pp * self.tp * self.dp

    @property
    def options(self) -> dict[str, Any]:
        """The options of a run; replicas follow from the number of ranks."""
        # Without a number of stages all ranks would be stages.
        found: dict[str, Any] = {"pipeline_parallel_degree": self.pp, "microbatches": self.microbatches}
        degrees = {"tensor_parallel_degree": self.tp, "sharded_data_parallel_degree": self.dp_shard}
        found |= {name: degree for name, degree in degrees.items() if degree > 1}
        if self.recomputes:
            found["activation_checkpointing"] = "all"
        return found

    def ranks_per_node(self, node_size: int) -> "RanksPerNode":
        """Most ranks of its groups on a node of ``node_size`` ranks."""
        return _ranks_per_node(
            MeshShape(pp=self.pp, dp=self.dp, dp_shard=self.dp_shard, tp=self.tp, node_size=node_size)
        )

    def __str__(self) -> str:
        degrees = {"pp": self.pp, "tp": self.tp, "shard": self.dp_shard, "replicas": self.dp_replicate}
        return " x ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "one device"


class RanksPerNode(NamedTuple):
    """Most ranks of a group on one node, by the axis of the group."""

    pp: int
    dp_shard: int
    dp_replicate: int


@lru_cache(maxsize=4096)
def _ranks_per_node(shape: MeshShape) -> RanksPerNode:
    axes = RanksPerNode._fields
    return RanksPerNode(*(max(Counter(map(shape.node_of, shape.group(0, axis))).values()) for axis in axes))


def layouts_on(cluster: Cluster, global_batch: int, *, num_units: int, splits: Sequence[int]) -> Iterator[JobLayout]:
    """All layouts that fill ``cluster`` with ``global_batch`` samples in equal microbatches.

    Args:
        cluster: Devices.
        global_batch: Samples of a step of all replicas.
        num_units: Most stages.
        splits: Numbers of ranks over which layers can be split, divisors of those of a node: split layers send their
            activations, for which links between nodes are too slow.
    """
    world = cluster.num_devices
    for tp in splits:
        for pp in divisors(world // tp):
            dp = world // (tp * pp)
            if pp > num_units or global_batch % dp:
                continue
            each = global_batch // dp
            for samples in divisors(each):
                # Fewer microbatches than stages leave stages idle, where smaller ones would not.
                if samples > MOST_SAMPLES or (samples > 1 and each // samples < pp):
                    continue
                for dp_shard in divisors(dp):
                    for recomputes in (False, True):
                        yield JobLayout(pp, tp, dp_shard, dp // dp_shard, each // samples, samples, recomputes)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [degree for degree in range(1, number + 1) if number % degree == 0]
