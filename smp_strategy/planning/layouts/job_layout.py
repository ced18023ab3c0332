"""Layout of a job: its degrees of parallelism, microbatches and recomputation; and all layouts that fill a cluster.

A batch of all ranks (``global_batch`` samples) is cut into ``dp * microbatches`` equal microbatches.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.planning.layouts.cluster import Cluster

__all__ = ["JobLayout", "divisors", "layouts_on"]

# Beyond this many samples in a microbatch kernels are large anyway, and activations only grow.
MOST_SAMPLES = 16
# Shorter pipelines than this multiple of the stages idle too long to be looked at.
FEWEST_PER_STAGE = 1


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
        """The options of a run, those that differ from their defaults."""
        degrees = {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "sharded_data_parallel_degree": self.dp_shard,
        }
        found: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
        found["microbatches"] = self.microbatches
        if self.recomputes:
            found["activation_checkpointing"] = "all"
        return found

    def ranks_per_node(self, node_size: int) -> "RanksPerNode":
        """Most ranks of its groups on a node of ``node_size`` ranks."""
        size = node_size if self.world_size % node_size == 0 else None
        return _ranks_per_node(MeshShape(pp=self.pp, dp=self.dp, dp_shard=self.dp_shard, tp=self.tp, node_size=size))

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


def layouts_on(cluster: Cluster, global_batch: int, *, num_units: int, most_tp: int) -> Iterator[JobLayout]:
    """All layouts that fill ``cluster`` with ``global_batch`` samples in equal microbatches.

    Args:
        cluster: Devices; layers are split inside of a node only, because each of them sends its activations.
        global_batch: Samples of a step of all replicas.
        num_units: Most stages.
        most_tp: Most ranks over which layers can be split.
    """
    world = cluster.num_devices
    for tp in divisors(world):
        if tp > most_tp or cluster.devices_per_node % tp:
            continue
        for pp in divisors(world // tp):
            dp = world // (tp * pp)
            # A shard group on several nodes fills them; replicas of it are equal then.
            if pp > num_units or global_batch % dp or cluster.nodes > 1 and world % cluster.devices_per_node:
                continue
            each = global_batch // dp
            for samples in divisors(each):
                if samples > MOST_SAMPLES or (each // samples < FEWEST_PER_STAGE * pp and samples > 1):
                    continue
                for dp_shard in divisors(dp):
                    for recomputes in (False, True):
                        yield JobLayout(pp, tp, dp_shard, dp // dp_shard, each // samples, samples, recomputes)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [degree for degree in range(1, number + 1) if number % degree == 0]
