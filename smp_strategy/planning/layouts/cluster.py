"""Cluster: devices, nodes and the links between them, as plain numbers.

The figures of :data:`DEVICES` are those of the data sheets; ``flops_share`` and ``bytes_share`` say which part of them
large kernels of eager PyTorch reach. Collectives are modelled as rings with a latency and a bandwidth (Thakur et al.,
"Optimization of Collective Communication Operations in MPICH", 2005), in two hops if a group spans nodes.

Layout of a job: its degrees of parallelism, microbatches and recomputation; and all layouts that fill a cluster.

A batch of all ranks (``global_batch`` samples) is cut into ``dp * microbatches`` equal microbatches.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import yaml

from smp_strategy.config.sizes import parse_bytes
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.device_model import HostLink, Machine
from smp_strategy.model.trace.work import Link

__all__ = ["DEVICES", "Cluster", "JobLayout", "device_named", "divisors", "layouts_on"]


_GB = 10**9
_FIGURES = ("memory", "peak_flops", "memory_bandwidth", "node_link", "network")
# Share of the data sheet's arithmetic and of its memory bandwidth that large kernels reach.
FLOPS_SHARE, BYTES_SHARE = 0.6, 0.75
# Share of a link's bandwidth that collectives reach.
LINK_SHARE = 0.7


class Device(NamedTuple):
    """A device and its links, as the data sheet has them."""

    memory_bytes: int
    peak_flops: float
    """Dense FLOP/s of matrix products in 16 bits, which MFU refers to."""
    bytes_per_second: float
    """Of its memory."""
    node_link: Link
    """To another device of the node, each way."""
    network: Link
    """From a node to another, each way, shared by all its devices."""
    per_node: int = 8
    """Devices of the usual node."""
    call_seconds: float = 5e-6
    """Launch of a kernel by eager PyTorch."""
    sends_beside: bool = True
    """Whether messages overlap with computation."""

    @property
    def machine(self) -> Machine:
        """Times of kernels, and of messages to a neighbour in the node."""
        host = HostLink(2.5e10, is_beside=True) if self.sends_beside else HostLink(5e9, is_beside=False)
        reached = self.node_link._replace(bytes_per_second=self.node_link.bytes_per_second * LINK_SHARE)
        return Machine(
            self.peak_flops * FLOPS_SHARE, self.bytes_per_second * BYTES_SHARE, self.call_seconds, reached, host
        )


DEVICES: Mapping[str, Device] = {
    # SXM modules in HGX nodes; networks of the instances p4d, p4de, p5, p5e and p6-b200.
    "a100-40gb": Device(40 * 2**30, 312e12, 1.555e12, Link(1e-5, 3e11), Link(2e-5, 5e10)),
    "a100": Device(80 * 2**30, 312e12, 2.039e12, Link(1e-5, 3e11), Link(2e-5, 5e10)),
    "h100": Device(80 * 2**30, 989e12, 3.35e12, Link(1e-5, 4.5e11), Link(2e-5, 4e11)),
    "h200": Device(141 * _GB, 989e12, 4.8e12, Link(1e-5, 4.5e11), Link(2e-5, 4e11)),
    "b200": Device(180 * _GB, 2250e12, 8e12, Link(1e-5, 9e11), Link(2e-5, 4e11)),
    # One core of a server and gloo through the loopback device: see `Machine.nominal`.
    "cpu": Device(4 * 2**30, 1e11, 1.3e10, Link(1e-4, 1.4e9), Link(2e-4, 1e9), 2, 2e-6, sends_beside=False),
}


@final
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices."""

    nodes: int
    devices_per_node: int
    device: Device
    name: str = ""
    """Name of the device."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def read(cls, text: str) -> Self:
        """Cluster of ``64xa100`` (devices, in the usual nodes), ``4x8xa100`` (nodes, devices of each), or a YAML file.

        The file has ``nodes``, ``devices_per_node`` and ``device`` (a name of :data:`DEVICES`), and may replace any
        figure of the device::

            nodes: 4
            devices_per_node: 8
            device: a100
            memory: 40GiB
            network: {latency: 20us, bandwidth: 400Gbit/s}

        Raises:
            ConfigError: with all mistakes.
        """
        if match := re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z][\w.-]*)", text.lower()):
            device = _device(match[3])
            count, nodes = int(match[2]), match[1]
            each = count if nodes else min(count, device.per_node)
            if not each or count % each:
                raise ConfigError(
                    f"`cluster` ({text}): {count} devices do not fill nodes of {each}. Take a "
                    "multiple of them, or say how many each of the nodes has, as in 4x8xa100."
                )
            return cls(nodes=int(nodes or count // each), devices_per_node=each, device=device, name=match[3])
        path = Path(text)
        if not path.is_file():
            raise ConfigError(
                f"`cluster` is neither a file nor of the form 64xa100 or 4x8xa100 (nodes, devices of each): {text!r}. "
                f"Devices: {', '.join(DEVICES)}."
            )
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"`cluster` ({text}) is no YAML: {error}") from None
        return cls._of(found, text)

    @classmethod
    def _of(cls, given: Any, source: str) -> Self:
        known = ("nodes", "devices_per_node", "device", *_FIGURES)
        if not isinstance(given, Mapping):
            raise ConfigError(f"`cluster` ({source}) must be a mapping with the keys {', '.join(known)}.")
        problems = [f"`{key}` is no key of a cluster ({', '.join(known)})." for key in given if key not in known]
        problems += [f"`{key}` is missing." for key in ("nodes", "device") if key not in given]
        if problems:
            raise ConfigError([f"{source}: {problem}" for problem in problems])
        device = _device(str(given["device"]))
        try:
            if "memory" in given:
                device = device._replace(memory_bytes=parse_bytes(str(given["memory"])))
            device = device._replace(
                peak_flops=_rate(given.get("peak_flops", device.peak_flops)),
                bytes_per_second=_rate(given.get("memory_bandwidth", device.bytes_per_second)),
                node_link=_link(given.get("node_link", {}), device.node_link),
                network=_link(given.get("network", {}), device.network),
            )
            nodes, each = (_count(key, given.get(key, device.per_node)) for key in ("nodes", "devices_per_node"))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{source}: {error}") from None
        return cls(nodes=nodes, devices_per_node=each, device=device, name=str(given["device"]))

    def ring(self, nbytes: float, ranks: int, *, per_node: int) -> float:
        """Seconds of an all-gather, or of a reduce-scatter, whose whole is ``nbytes``; an all-reduce takes two.

        Args:
            nbytes: Bytes of the gathered tensor on each rank.
            ranks: Ranks of the group.
            per_node: Of these, ranks on the same node.
        """
        if ranks <= 1:
            return 0.0
        inner = min(ranks, per_node)
        nodes = -(-ranks // inner)
        seconds = 0.0
        if inner > 1:
            link = self.device.node_link
            seconds += (inner - 1) * link.latency + nbytes * (inner - 1) / inner / (link.bytes_per_second * LINK_SHARE)
        if nodes > 1:
            # All rings through a node share its network, and each of the node's devices is in one.
            network = self.device.network
            share = network.bytes_per_second * LINK_SHARE / max(1, self.devices_per_node // inner)
            seconds += (nodes - 1) * network.latency + nbytes * (nodes - 1) / nodes / share
        return seconds

    def link(self, *, is_inside: bool) -> Link:
        """Connection of neighbouring stages, inside of a node or between nodes."""
        if is_inside:
            return self.device.machine.link
        network = self.device.network
        return network._replace(bytes_per_second=network.bytes_per_second * LINK_SHARE / self.devices_per_node)


def device_named(name: str) -> Device | None:
    """Figures of the device with a ``name`` like NVIDIA H100 80GB HBM3; ``None``: not in :data:`DEVICES`.

    They are those of SXM modules; a PCIe card of the same name has others.
    """
    words = re.split(r"[\s-]+", name.lower())
    return None if "pcie" in words else next((DEVICES[word] for word in words if word in DEVICES), None)


def _device(name: str) -> Device:
    found = DEVICES.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), DEVICES, 1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise ConfigError(f"`device` {name!r} is unknown.{hint} Known: {', '.join(DEVICES)}.")
    return found


def _count(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{key}` must be a positive number, but is {value!r}.")
    return value


def _link(given: Any, before: Link) -> Link:
    if not isinstance(given, Mapping) or set(given) - {"latency", "bandwidth"}:
        raise ValueError(f"a link has `latency` and `bandwidth`, but is {given!r}.")
    latency = before.latency if "latency" not in given else _seconds(given["latency"])
    return Link(latency, before.bytes_per_second if "bandwidth" not in given else _rate(given["bandwidth"]))


def _seconds(value: Any) -> float:
    match = re.fullmatch(r"([\d.]+(?:e-?\d+)?)\s*(us|ms|s)?", str(value))
    if match is None:
        raise ValueError(f"{value!r} is no time. Write 20us.")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}[match[2]]


def _rate(value: Any) -> float:
    match = re.fullmatch(r"([\d.]+(?:e\+?\d+)?)\s*([KMGTP]?)(bit|B|FLOP)?(?:/?s)?", str(value))
    if match is None:
        raise ValueError(f"{value!r} is no rate. Write 400Gbit/s, 300GB/s or 312TFLOP/s.")
    factor = 1000 ** " KMGTP".index(match[2] or " ")
    return float(match[1]) * factor / (8 if match[3] == "bit" else 1)


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
