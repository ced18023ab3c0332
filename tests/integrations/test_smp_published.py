"""Scripts of ours that make the calls of AWS's published scripts in their order: digits, language models."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from smp_checks import assert_same, batches, net, on_ranks, plain
from torch.optim.lr_scheduler import StepLR

import smp_strategy.smp as smp
from smp_strategy import ConfigError, UnsupportedError
from smp_strategy.checkpoint.storage.torch_load import plain_content

# --- the digits: a step that returns Python numbers ----------------------------------------------------------------


@smp.step
def train_step(model, scaler, data, target):
    with torch.autocast("cpu", enabled=False):
        output = model(data)
    loss = F.cross_entropy(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.cross_entropy(output, target, reduction="sum").item()
    correct = output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
    return loss, correct


test_step.__test__ = False


def digits(num_microbatches, folder):
    smp.init({"partitions": 2, "microbatches": num_microbatches, "ddp": True})
    assert smp.local_rank() == smp.rank()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=1.0)
    model.train()
    losses = []
    for data, target in batches():
        optimizer.zero_grad()
        _, loss = train_step(model, scaler, data, target)
        losses.append(loss.reduce_mean())
        optimizer.step()
    model.eval()
    loss_sum, correct = 0.0, 0
    with torch.no_grad():
        for data, target in batches():
            loss_batch, correct_batch = test_step(model, data, target)
            assert len(loss_batch) == len(correct_batch) == num_microbatches
            loss_sum += sum(loss_batch)
            correct += sum(correct_batch)
    scheduler.step()
    smp.barrier()
    if smp.dp_rank() == 0:
        smp.save({"model_state_dict": model.local_state_dict()}, folder / "digits.pt", partial=True)
    smp.barrier()
    return torch.stack(losses), loss_sum, correct, model.state_dict()


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_script_in_the_order_of_the_digits_counts_as_one_process(tmp_path, num_microbatches):
    losses, weights = plain(parts=num_microbatches)
    reference = net()
    reference.load_state_dict(weights)
    with torch.no_grad():
        outputs = [(reference(data), target) for data, target in batches()]
    expected = sum(F.cross_entropy(output, target, reduction="sum").item() for output, target in outputs)
    right = sum(int(output.argmax(1).eq(target).sum()) for output, target in outputs)
    for found, loss_sum, correct, state in on_ranks(digits, 2, num_microbatches, tmp_path):
        assert torch.equal(found, losses)
        assert loss_sum == pytest.approx(expected, rel=1e-6)
        assert correct == right
        assert_same(state, weights)
    assert {path.name for path in tmp_path.iterdir()} == {"digits.pt_0", "digits.pt_1"}


@smp.step
def several_kinds(model, data, words):
    model(data)
    return [len(data), "a"], {"n": 1, "words": words}, list(range(len(data)))


def kinds_of_results():
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(net())
    with torch.no_grad():
        for data, shown in ((batches()[0][0], [[0, 0], [1, 1], [2, 2], [3, 3]]), (torch.zeros(3, 8), [[0, 1], [0]])):
            pair, named, numbers = several_kinds(model, data, "b")
            assert pair[1] == ["a", "a"]
            assert named == {"n": [1, 1], "words": ["b", "b"]}
            assert numbers == shown  # lists of different lengths have no common structure


def test_results_without_tensors_keep_their_structure_too():
    on_ranks(kinds_of_results, 1)


# --- the language models: everything is set after the model is wrapped ----------------------------------------------

GIVEN = {
    **{"ddp": True, "tensor_parallel_degree": 1, "pipeline_parallel_degree": 2, "microbatches": 2, "bf16": False},
    **{"shard_optimizer_state": False, "prescaled_batch": True, "fp16": True, "offload_activations": False},
    **{"delayed_parameter_initialization": False, "optimize": "speed", "placement_strategy": "cluster"},
    **{"activation_loading_horizon": 4, "skip_tracing": False, "auto_partition": False, "default_partition": 0},
    **{"static_mode": True, "fast_mode": False, "sharded_data_parallel_degree": 1, "ddp_dist_backend": "auto"},
    **{"sdp_hierarchical_allgather": False, "sdp_gradient_clipping": 1.0},
}
LAYERS = {
    **{"zero_init": True, "distribute_embedding": False, "use_alibi": False, "attention_in_fp32": False},
    **{"fp32_residual_addition": False, "query_key_layer_scaling": False, "fused_softmax": True},
    **{"fused_dropout": False, "fused_bias_gelu": True, "flash_attention": True},
}


@smp.step
def language_step(model, inputs, targets, args):
    loss = F.cross_entropy(model(inputs).float(), targets)
    model.backward(loss)
    return loss


class Config:
    __module__ = "transformers.models.own"

    def to_dict(self):
        return {"n_layer": np.int64(4), "activation": "gelu"}


def language(folder, steps, num_params):
    smp.init({**GIVEN, "active_microbatches": 2})
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.float16, **LAYERS):
        model = net()
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    blocks = model.get_module().blocks
    for number, block in enumerate(blocks.children()):
        smp.set_partition(block, int(number > 0))
    optimizer = torch.optim.AdamW([{"params": list(model.get_module().parameters())}], lr=0.05, eps=1e-3)
    for block in blocks.children():
        smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "init_scale": 2.0**10},
    )
    told = []
    model.register_post_partition_hook(lambda model, optimizer: told.append("partition"))
    begun, loaded = 0, None
    if (folder / "newest").exists():
        loaded = smp.resume_from_checkpoint(folder, tag=None, partial=True)
        begun = loaded["total_steps"]
    losses = []
    for inputs, targets in batches()[begun:steps]:
        optimizer.zero_grad(set_to_none=True)
        loss = language_step(model, inputs, targets, None).reduce_mean()
        optimizer.clip_master_grads(100.0)
        optimizer.step()
        assert not optimizer.overflow
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(loss / smp.dp_size())
    content = {"total_steps": steps, "num_params": num_params, "model_config": Config()}
    smp.save_checkpoint(
        folder,
        tag=f"total_steps{steps}",
        partial=True,
        model=model,
        optimizer=optimizer,
        user_content=content,
        num_kept_partial_checkpoints=2,
    )
    for call in (lambda: smp.set_partition(blocks[0], 1), lambda: smp.set_activation_checkpointing(blocks[0])):
        with pytest.raises(UnsupportedError, match="is called after the first step"):
            call()
    stages = {unit.name: unit.stage for unit in model.engine.partition.units}
    assert told == ["partition"]
    assert stages == {"inlet": 0, "outlet": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1}
    recomputed = {name for name, policy in model.engine.layout.activation_policies.items() if policy.recompute}
    assert recomputed == {f"blocks.{number}" for number in range(4)}
    return losses, loaded, model.state_dict()


def test_a_script_in_the_order_of_the_language_models_goes_on_to_the_bit(tmp_path):
    losses, weights = plain(parts=2)
    number = np.prod((3, 4))
    whole = on_ranks(language, 2, tmp_path / "whole", 4, number)
    on_ranks(language, 2, tmp_path / "parts", 2, number)
    for (found, _, state), (rest, content, again) in zip(
        whole, on_ranks(language, 2, tmp_path / "parts", 4, number), strict=True
    ):
        torch.testing.assert_close(torch.stack(found), losses, rtol=2e-2, atol=2e-3)
        assert_same(state, weights, rtol=5e-2, atol=2e-2)
        assert torch.equal(torch.stack(rest), torch.stack(found[2:]))
        assert_same(again, state)
        assert content == {
            "total_steps": 2,
            "num_params": 12,
            "model_config": {"n_layer": 4, "activation": "gelu"},
        }
        assert type(content["num_params"]) is int


def half_placed(expected):
    smp.init({"partitions": 2, "ddp": True, "auto_partition": False, "default_partition": 0})
    model = smp.DistributedModel(net())
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=expected):
        language_step(model, *batches()[0], None)


def test_placements_are_checked_in_the_first_step():
    on_ranks(half_placed, 2, "No unit is on stage 1")


def test_content_of_scripts_becomes_plain():
    noted = []
    given = {"a": [np.float32(0.5), np.bool_(True), (np.str_("b"),)], "config": Config(), 3: {np.int64(1)}}
    found = plain_content(given, "user_content", noted.append)
    assert json.dumps(found["a"]) == '[0.5, true, ["b"]]'
    assert found["config"] == {"n_layer": 4, "activation": "gelu"}
    assert found[3] == {1}
    assert noted == [
        "`user_content['config']`, a Config, is written as a dict (`to_dict`), and a dict when it is loaded."
    ]


def slicer(num_microbatches):
    smp.init({"microbatches": num_microbatches})

    class Ragged:
        def __init__(self, values):
            self.values = values

        def smp_slice(self, num_mb, mb, axis):
            return Ragged(self.values[mb::num_mb])

    @smp.step(input_split_axes={"inputs": 0})
    def counts(model, inputs, ragged):
        model(inputs)
        return len(ragged.values)

    model = smp.DistributedModel(net())
    with torch.no_grad():
        assert sum(counts(model, batches()[0][0], Ragged([1, 2, 3, 4]))) == 4
        assert counts(model, batches()[0][0][:1], Ragged([1, 2])) == [2]  # a single sample is one microbatch


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_objects_that_cut_themselves_arrive_as_themselves(num_microbatches):
    on_ranks(slicer, 1, num_microbatches)
