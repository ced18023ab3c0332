"""From one of our forms to the other, and how little memory that takes."""

import gc

import pytest
import torch

from smp_strategy.checkpoint.convert import safetensors as safetensors_files
from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.checkpoint.convert.detect_format import open_checkpoint
from smp_strategy.checkpoint.convert.writers import Scratch, save_full, save_sharded
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.engine.saving.checkpoint_content import split_checkpoint


@pytest.fixture
def checkpoint():
    """As the strategy's hooks hand it over: tensors that are spread, also where callbacks have them, and others."""
    weight = torch.randn(3, 2)
    return {
        "state_dict": {"a": HeldTensor.whole(weight), "_extra_state": {"scale": 3}},
        "optimizer_states": [
            {
                "state": {"a": {"exp_avg": HeldTensor.whole(weight + 1), "step": torch.tensor(4.0)}},
                "param_groups": [{"params": ["a"], "lr": 0.1}],
            }
        ],
        "gradients": {"a": HeldTensor.whole(weight + 2)},
        "callbacks": {"average": {"weights": [HeldTensor.whole(weight + 3)], "kept": torch.ones(2)}},
        "pytorch-lightning_version": "2.6",
        "epoch": 1,
        "global_step": 7,
    }


def test_everything_of_a_directory_is_in_the_file_and_again_in_a_directory(checkpoint, tmp_path):
    weight = checkpoint["state_dict"]["a"].blocks[0].tensor
    state, rest = split_checkpoint(checkpoint)
    ShardedWriter().prepare(state).write(tmp_path / "ours", rest=rest, note={"layout": {"pp": 2}})
    save_full(open_checkpoint(tmp_path / "ours"), tmp_path / "full")
    save_sharded(open_checkpoint(tmp_path / "full"), tmp_path / "again")
    save_full(open_checkpoint(tmp_path / "again"), tmp_path / "full2")
    for name in ("full", "full2"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert found["state_dict"]["a"].equal(weight)
        assert found["state_dict"]["_extra_state"] == {"scale": 3}
        assert found["optimizer_states"][0]["state"][0]["exp_avg"].equal(weight + 1)
        assert found["optimizer_states"][0]["param_groups"] == [{"params": [0], "lr": 0.1}]
        assert found["gradients"]["a"].equal(weight + 2)
        assert found["callbacks"]["average"]["weights"][0].equal(weight + 3)
        assert found["callbacks"]["average"]["kept"].equal(torch.ones(2))
        assert (found["epoch"], found["global_step"]) == (1, 7)
    assert open_checkpoint(tmp_path / "ours").note == {"layout": {"pp": 2}}


def test_of_tensors_that_are_read_one_is_in_memory(tmp_path):
    class Counting:
        """A tensor that tells how many of its kind there are."""

        most = 0

        def read(self):
            there = sum(type(each) is torch.Tensor and each.shape == (1000, 7) for each in gc.get_objects())
            type(self).most = max(self.most, there)
            return torch.ones(1000, 7)

    source = Counting()
    tensors = {str(number): LazyTensor((1000, 7), torch.float32, source.read) for number in range(6)}
    safetensors_files.write_safetensors(tmp_path, tensors, max_bytes=2 * 28000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert source.most == 0, "none besides the one that is read then"


def test_what_is_in_scratch_files_is_not_in_memory_of_its_own(tmp_path):
    with Scratch(tmp_path) as scratch:
        lazy = LazyTensor((5, 3), torch.bfloat16, lambda: torch.ones(5, 3, dtype=torch.bfloat16), memory="one")
        kept = scratch.tensor(lazy)
        assert kept.equal(torch.ones(5, 3, dtype=torch.bfloat16))
        assert scratch.tensor(lazy) is kept
        other = scratch.tensor(LazyTensor((2,), torch.int64, lambda: torch.arange(2)))
        empty = scratch.tensor(LazyTensor((0, 2), torch.int64, lambda: torch.empty(0, 2, dtype=torch.int64)))
        assert (other.tolist(), empty.shape) == ([0, 1], (0, 2))
        assert kept.untyped_storage().nbytes() == 30
        assert list(tmp_path.iterdir()) == []
    assert kept.sum() == 15
