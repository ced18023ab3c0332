"""Clusters and layouts: forms that are read, times of rings, layouts that fill the devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.work import Link
from smp_strategy.planning.layouts.cluster import DEVICES, LINK_SHARE, Cluster, JobLayout, layouts_on


@pytest.mark.parametrize(
    ("text", "nodes", "each"),
    [("64xa100", 8, 8), ("4x8xH100", 4, 8), ("3x5xa100", 3, 5), ("4xh200", 1, 4), ("4xcpu", 2, 2)],
)
def test_short_forms(text, nodes, each):
    cluster = Cluster.read(text)
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, each)
    assert cluster.device == DEVICES[text.rsplit("x", 1)[1].lower()]


def test_a_file_replaces_figures(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes: 2\ndevice: a100\nmemory: 40GiB\n"
        "network: {latency: 30us, bandwidth: 100Gbit/s}\npeak_flops: 200TFLOP/s\n"
    )
    cluster = Cluster.read(str(file))
    assert cluster.num_devices == 16
    assert cluster.device.memory_bytes == 40 * 2**30
    assert cluster.device.network == pytest.approx(Link(3e-5, 1.25e10))
    assert cluster.device.peak_flops == 2e14
    assert cluster.device.bytes_per_second == DEVICES["a100"].bytes_per_second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nodes: 2\ndevice: a101\n", "Did you mean `a100`"),
        ("nodes: 0\ndevice: a100\n", "`nodes` must be a positive number, but is 0"),
        ("nodes: 2\n", "`device` is missing"),
        ("nodes: 2\ndevice: a100\nnetwrk: 1\n", "`netwrk` is no key"),
        ("nodes: 2\ndevice: a100\nnetwork: {bandwidth: fast}\n", "'fast' is no rate"),
        ("nodes: 2\ndevice: a100\nmemory: much\n", "no amount of memory"),
        ("- a100", "must be a mapping"),
        ("{", "is no YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(content, message, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Cluster.read(str(file))


@pytest.mark.parametrize("text", ["a100", "nowhere.yaml", "0xa100", "9xa100"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="cluster"):
        Cluster.read(text)


def test_a_ring_on_one_node_takes_the_time_of_its_bytes():
    cluster = Cluster.read("8xa100")
    link = cluster.device.node_link
    expected = 3 * link.latency + 3 / 4 * 1e9 / (link.bytes_per_second * LINK_SHARE)
    assert cluster.ring(1e9, 4, per_node=4) == pytest.approx(expected)


def test_all_devices_of_a_node_share_its_network():
    cluster = Cluster.read("2x8xa100")
    alone = cluster.ring(1e9, 2, per_node=1)  # eight such rings at once, one for each device
    together = cluster.ring(1e9, 16, per_node=8) - cluster.ring(1e9, 8, per_node=8)  # one that all of them are in
    assert alone == pytest.approx(together * 8, rel=0.01)


@given(st.integers(1, 8).map(lambda power: 2**power), st.floats(1, 1e10), st.sampled_from([1, 2, 4, 8]))
def test_more_bytes_take_longer(ranks, nbytes, per_node):
    cluster = Cluster.read("64x8xh100")
    assert cluster.ring(nbytes, 1, per_node=1) == 0
    assert 0 < cluster.ring(nbytes, ranks, per_node=per_node) < cluster.ring(2 * nbytes, ranks, per_node=per_node)


@given(st.sampled_from(["4xa100", "2x8xa100", "3x4xh100", "1x6xa100"]), st.integers(1, 96), st.integers(1, 12))
def test_layouts_fill_the_cluster_with_the_whole_batch(text, batch, num_units):
    cluster = Cluster.read(text)
    splits = [tp for tp in (1, 2, 4) if cluster.devices_per_node % tp == 0]
    found = list(layouts_on(cluster, batch, num_units=num_units, splits=splits))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.world_size == cluster.num_devices
        assert layout.dp * layout.microbatches * layout.samples == batch
        assert layout.pp <= num_units
        assert layout.tp in splits


def test_the_usual_degrees_are_among_the_layouts():
    found = set(layouts_on(Cluster.read("2x8xa100"), 64, num_units=24, splits=[1, 2, 4, 8]))
    assert {
        JobLayout(2, 1, 8, 1, 4, 2),
        JobLayout(1, 1, 16, 1, 1, 4, True),
        JobLayout(4, 2, 1, 2, 16, 2),
        JobLayout(1, 8, 2, 1, 2, 16),
    } <= found
