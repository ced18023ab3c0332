"""What users may add to a checkpoint is what can be read without running anything."""

import argparse
import collections
import io

import numpy as np
import pytest
import torch

from smp_strategy.checkpoint.storage.torch_load import check_content
from smp_strategy.errors import ConfigError

PLAIN = {
    "step": 3,
    "loss": 0.5,
    "done": False,
    "none": None,
    "phase": 1j,
    "text": "a",
    "bytes": b"a",
    "array": bytearray(b"a"),
    "list": [1, (2, {3})],
    "tensor": torch.ones(2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "type": [torch.bfloat16, torch.Size([1]), torch.device("cpu")],
    "ordered": collections.OrderedDict(a=1),
    4: {},
}


def read(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_is_allowed_is_read_again():
    check_content(PLAIN, "user_content")
    found = read(PLAIN)
    assert list(found) == list(PLAIN)
    for name in PLAIN.keys() - {"tensor", "parameter"}:
        assert found[name] == PLAIN[name]
        assert type(found[name]) is type(PLAIN[name])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [argparse.Namespace()]}, r"`user_content\['a'\]\[0\]` is of type argparse.Namespace.*vars\(args\)"),
        ({"rng": (1, np.ones(2))}, r"`user_content\['rng'\]\[1\]` is of type numpy.ndarray.*tolist"),
        (np.float64(1), r"`user_content` is of type numpy.float64"),
        (collections.namedtuple("Pair", "a")(1), "Pair"),
        ({"a": lambda: 0}, "builtins.function"),
        ({argparse.Namespace: 1}, "builtins.type"),
    ],
)
def test_what_is_not_is_named_with_its_place(value, message):
    with pytest.raises(ConfigError, match=message):
        check_content(value, "user_content")
