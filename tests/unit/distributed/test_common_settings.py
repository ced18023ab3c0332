"""Settings that all ranks must have alike: their texts, and what is said about those that differ."""

import enum
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from smp_strategy.distributed.agreement.common_settings import differences, explained, named, plain, shown
from smp_strategy.engine.lifecycle.run_lifecycle import of_fields, of_process


class Word(enum.Enum):
    FIRST = "first"


class Plain:
    pass


@dataclass(slots=True)
class Options:
    rate: float = 0.1
    inner: object = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"),
        (True, "True"),
        (None, "None"),
        ("a", "'a'"),
        (Word.FIRST, "'first'"),
        (torch.bfloat16, "torch.bfloat16"),
        (timedelta(minutes=5), "0:05:00"),
        (Path("a/b"), "a/b"),
        ({"b": 1, "a": (2, [3])}, "{'a': [2, [3]], 'b': 1}"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (Plain(), "Plain"),
        (Plain, "Plain"),
        (torch.nn.functional.relu, "relu"),
        (Options(inner=Options(0.2)), "Options({'inner': Options({'inner': None, 'rate': 0.2}), 'rate': 0.1})"),
    ],
)
def test_equal_settings_have_equal_texts(value, text):
    assert shown(value) == text


def test_a_setting_that_holds_itself_has_a_text():
    endless = [1]
    endless.append(endless)
    assert shown(endless) == "[1, [1, [1, [1, list]]]]"


def test_settings_of_an_optimizer_are_compared_however_deep():
    assert plain((0.9, torch.tensor(2.0), (1, [2]))) == (0.9, 2.0, "[1, [2]]")
    assert plain([Plain(), None]) == (None, None)
    assert plain({"a": 1}) is None


def test_a_long_text_is_cut_but_still_tells_values_apart():
    one, other = shown("x" * 500 + "1"), shown("x" * 500 + "2")
    assert one != other
    assert len(one) < 250


@pytest.mark.parametrize(
    ("everyones", "expected"),
    [
        ([{"a": 1}, {"a": 1}], {}),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], {"b": [2, 3]}),
        ([{"a": 1}, {}], {"a": [1, "nothing"]}),
        ([{"a": float("nan")}, {"a": float("nan")}], {}),
        ([{"a": True}, {"a": 1}], {"a": [True, 1]}),
    ],
)
def test_only_settings_that_differ_are_found(everyones, expected):
    assert differences(everyones) == expected


def test_an_error_names_settings_values_and_ranks():
    clip, options = "`Trainer(gradient_clip_val)`", {"`fp16` of SMPStrategy": "True"}
    message = explained([{clip: "1.0"}, {clip: "0.01", **options}, {clip: "1.0"}, {clip: "1.0"}])
    assert f"\n  {clip}: 1.0 on ranks 0, 2, 3, 0.01 on rank 1\n" in message
    assert "\n  `fp16` of SMPStrategy: nothing on ranks 0, 2, 3, True on rank 1\n" in message


def test_of_very_many_ranks_the_first_are_named():
    assert named(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 others"


def test_attributes_that_an_object_lacks_are_left_out():
    assert of_fields(timedelta(seconds=3), ("seconds", "absent"), "`f({})`") == {"`f(seconds)`": "3"}


def test_a_process_tells_its_versions_and_modes(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = of_process("lightning")
    assert found["the version of torch"] == torch.__version__
    assert found["the version of lightning"]
    assert found["the environment variable NVIDIA_TF32_OVERRIDE"] == "0"
    assert found["`torch.get_default_dtype()`"] == "torch.float32"
