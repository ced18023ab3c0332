"""Ranks that load a pretrained model read their share of it, and have no memory for more."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from smp_strategy.engine.local_model import LocalModel
from smp_strategy.engine.pretrained import deferring
from smp_strategy.testing import run_ranks
from tests.ranks.test_delayed import HuggingFace, LivingBytes, bytes_while_a_share_is_taken, engine_for

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp4": (4, 4, {}),
    "sdp4": (4, 1, {"sharded_data_parallel_degree": 4}),
    "pp2_sdp2": (4, 2, {"sharded_data_parallel_degree": 2}),
}


def write_weights(folder: Path) -> int:
    """Save a model of 30 MB in several files; returns the bytes of its parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4000, **sizes))
    model.save_pretrained(folder, max_shard_size="8MB")
    return sum(parameter.nbytes for parameter in model.parameters())


def load(folder: Path) -> HuggingFace:
    with deferring(), torch.device("meta"):
        return HuggingFace(AutoModelForCausalLM.from_pretrained(folder))


def bytes_of_a_load(monkeypatch: pytest.MonkeyPatch, folder: Path, pp: int, options: dict[str, Any]) -> tuple[int, ...]:
    with LivingBytes() as counter:
        model = load(folder)
    return counter.most, *bytes_while_a_share_is_taken(monkeypatch, pp, model, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_needs_memory_for_the_share_of_a_rank_and_one_unit(layout, tmp_path, monkeypatch):
    total = write_weights(tmp_path)
    world, pp, options = LAYOUTS[layout]
    for before, most, share, unit, parameters in run_ranks(bytes_of_a_load, world, monkeypatch, tmp_path, pp, options):
        assert parameters == total > 30e6
        assert share < 0.4 * total
        assert before < 0.01 * total
        assert most <= 1.1 * share + unit


def bytes_read(monkeypatch: pytest.MonkeyPatch, folder: Path, pp: int, options: dict[str, Any]) -> int:
    """Bytes that this rank reads from files while it takes its share."""
    model = load(folder)
    engine = engine_for(model, pp=pp, sdp_param_persistence_threshold=0, **options)
    counts: list[int] = []
    construct, read = LocalModel.__init__, os.preadv

    def counted(self: LocalModel, *args: Any, **kwargs: Any) -> None:
        def reading(*given: Any) -> int:
            counts.append(read(*given))
            return counts[-1]

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", reading)
            construct(self, *args, **kwargs)

    monkeypatch.setattr(LocalModel, "__init__", counted)
    batch = {"tokens": torch.randint(3000, (4, 8), generator=torch.Generator().manual_seed(0))}
    engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
    return sum(counts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_value_is_read_by_one_rank_and_once(layout, tmp_path, monkeypatch):
    total = write_weights(tmp_path)
    world, pp, options = LAYOUTS[layout]
    assert sum(run_ranks(bytes_read, world, monkeypatch, tmp_path, pp, options)) == total
