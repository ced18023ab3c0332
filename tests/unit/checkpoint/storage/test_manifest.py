import random

import pytest

from smp_strategy.checkpoint.storage.manifest import _END, _LAST, Manifest, Region, digest, is_plain_name
from smp_strategy.errors import CheckpointError

MANIFEST = Manifest(
    note={"step": 7, "layout": {"pp": 2}},
    files={
        "a": (
            Region(name="x.ä", offset=0, before=3, values=10, behind=2, digests=("0" * 32,) * 5),
            Region(name="y", offset=15, before=0, values=0, behind=1, digests=("1" * 32,)),
        ),
        "b": (),
    },
    piece=4,
)


def test_a_manifest_is_read_as_it_was_written():
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert MANIFEST.files["a"][0].pieces(4) == [(0, 3), (3, 7), (7, 11), (11, 13), (13, 15)]


def test_every_flipped_bit_and_every_missing_end_is_noticed():
    data = MANIFEST.to_bytes()
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(bytes(flipped))
    for length in random.Random(0).sample(range(len(data)), 50):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(data[:length])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "another", "version": 1', "of the format 'another'"),
        ('{"format": "smp_strategy sharded checkpoint", "version": 2', "Read it with a newer"),
        ('{"format": "smp_strategy sharded checkpoint", "version": 1', "KeyError"),
        ("[1", "is not one"),
        ("{" * 5000, "is not one"),
        (MANIFEST.to_bytes().rpartition(_END)[0].decode().replace('"a"', '"../a"'), "is not the name of a file"),
        (MANIFEST.to_bytes().rpartition(_END)[0].decode().replace(", 3, 10", ", -3, 10"), "a region of 'a'"),
        (MANIFEST.to_bytes().rpartition(_END)[0].decode().replace(", 3, 10, 2", ", 3, 1e9, 2"), "a region of 'a'"),
        (MANIFEST.to_bytes().rpartition(_END)[0].decode().replace('"piece": 4', '"piece": 0'), "pieces of 0 bytes"),
        (MANIFEST.to_bytes().rpartition(_END)[0].decode().replace("0000", "", 1), "digests"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(text, message):
    assert text != MANIFEST.to_bytes().rpartition(_END)[0].decode()
    data = text.encode() + _END + digest(text.encode()).encode() + _LAST
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_bytes(data)


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "../a", "a\0", 3, None])
def test_what_leads_out_of_the_directory_is_no_name_of_a_file(name):
    assert not is_plain_name(name)
    assert is_plain_name("__0_0.distcp")
