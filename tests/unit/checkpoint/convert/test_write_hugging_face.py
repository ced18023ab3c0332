import json

import pytest
import torch

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.convert.writers import (
    copy_configuration,
    hugging_face_weights,
    main_dtype,
    without_tied,
)
from smp_strategy.errors import CheckpointError


def lazy(**tensors):
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def test_tensors_that_are_one_are_saved_once():
    weight = torch.randn(3, 2)
    kept, tied = without_tied(lazy(a=weight, b=weight, c=weight[:2], d=weight.clone()), {})
    assert (list(kept), tied) == (["a", "c", "d"], {"b": "a"})


def test_equal_tensors_of_the_size_of_the_vocabulary_are_tied():
    weight = torch.randn(7, 2)
    weights = lazy(embed=weight, other=torch.randn(7, 2), head=weight.clone())
    for where in ({"vocab_size": 7}, {"text_config": {"vocab_size": 7}}):
        assert without_tied(weights, where)[1] == {"head": "embed"}
    assert without_tied(weights, {"vocab_size": 7, "tie_word_embeddings": False})[1] == {}
    assert without_tied(weights, {"vocab_size": 8})[1] == {}


def test_the_attribute_of_a_lightning_module_is_taken_away():
    contents = CheckpointContents(
        kind="", weights=lazy(**{"net.a": torch.ones(1)}), rest={"pytorch-lightning_version": "2"}
    )
    assert list(hugging_face_weights(contents, {}, None)[0]) == ["a"]
    contents.rest = {}
    assert list(hugging_face_weights(contents, {}, None)[0]) == ["net.a"]


def test_what_a_given_prefix_leaves_out_is_said():
    weights = lazy(**{"net.a": torch.ones(1), "loss.weight": torch.ones(2)})
    contents = CheckpointContents(kind="", weights=weights, rest={"pytorch-lightning_version": "2"})
    with pytest.raises(CheckpointError, match="--prefix"):
        hugging_face_weights(contents, {}, None)
    kept, remarks = hugging_face_weights(contents, {}, "net.")
    assert list(kept) == ["a"]
    assert "1 tensors were left out" in remarks[0]
    assert "loss.weight" in remarks[0]


def test_everything_but_weights_is_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors", "pytorch_model.bin"):
        (source / name).write_text("x")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "config.json").write_text('{"model_type": "gpt2", "dtype": "float32"}')
    copied = copy_configuration(source, target, torch.bfloat16)
    assert sorted(copied) == ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json"]
    assert sorted(each.name for each in target.iterdir()) == sorted(copied)
    assert json.loads((target / "config.json").read_text()) == {"model_type": "gpt2", "dtype": "bfloat16"}


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_directory_without_a_configuration_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="no configuration of a Hugging Face model"):
        copy_configuration(tmp_path, tmp_path, None)


def test_the_dtype_is_that_of_most_numbers():
    half, other = torch.ones(9, dtype=torch.bfloat16), torch.ones(2)
    assert main_dtype(lazy(a=half, b=other, c=torch.arange(100))) == torch.bfloat16
    assert main_dtype({}) is None
