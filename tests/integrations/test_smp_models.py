"""Models under SageMaker's functions: how they are created, placed, split and checkpointed; its layers."""

import pytest
import torch
import torch.nn.functional as F
from smp_checks import LAYOUTS, Net, adamw, assert_same, batches, begin, net, on_ranks, plain, train_step
from smp_strategy.smp.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from smp_strategy.smp.nn.huggingface.gptj import translate_hf_gptj_state_dict_to_smdistributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smp_strategy.smp as smp
from smp_strategy import CheckpointError, ConfigError, UnsupportedError

PP2 = {"partitions": 2, "microbatches": 4}

# --- creation -------------------------------------------------------------------------------------------------------


def placed(parameters):
    smp.init(parameters | {"auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    model = Net()
    with smp.partition(1):
        model.outlet = nn.Linear(16, 4)
    smp.set_partition(model.blocks[3], 1)
    model = smp.DistributedModel(model)
    train_step(model, *batches()[0])
    return smp.pp_rank(), sorted({name.split(".")[0] for name, _ in model.local_named_parameters()})


def test_modules_are_placed_by_hand():
    # The last stage is on the lowest rank.
    assert on_ranks(placed, 2, PP2) == [(0, ["blocks", "outlet"]), (1, ["blocks", "inlet"])]


def ignored(parameters):
    smp.init(parameters)
    with smp.partition(0):
        model = net()
    smp.set_partition(model.outlet, 0)
    model = smp.DistributedModel(model)
    train_step(model, *batches()[0])
    return len(list(model.local_parameters()))


def test_placements_by_hand_are_ignored_under_automatic_partition():
    assert all(on_ranks(ignored, 2, PP2))


def delayed(parameters, how):
    smp.init(parameters | ({"delayed_parameter_initialization": True} if how == "option" else {}))
    context = smp.model_creation(dtype=torch.float64) if how == "option" else smp.delay_param_initialization()
    with context:
        model = Net()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.inlet.weight.dtype == (torch.float64 if how == "option" else torch.float32)
    assert torch.get_default_dtype() == torch.float32
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    data, targets = batches()[0]
    train_step(model, data.to(model.inlet.weight.dtype), targets)
    optimizer.step()
    state = model.state_dict()
    assert all(value.isfinite().all() for value in state.values())
    return state


@pytest.mark.parametrize("how", ["option", "context"])
@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_values_may_come_after_the_partition(layout, how):
    ranks, parameters = LAYOUTS[layout]
    first, *others = on_ranks(delayed, ranks, parameters, how)
    for other in others:
        assert_same(other, first)


def split_some(parameters):
    smp.init(parameters)
    with smp.tensor_parallelism(flash_attention=True, fused_softmax=True):
        model = net()
    smp.set_tensor_parallelism(model.blocks[0], False)
    model = smp.DistributedModel(model)
    train_step(model, *batches()[0])
    with pytest.raises(ConfigError, match="`smp.model_creation` got unknown arguments: fused_sofmax"):
        smp.model_creation(fused_sofmax=True).__enter__()
    return {name.split(".")[1] for name, each in model.named_parameters() if model.is_distributed_parameter(each)}


def test_chosen_modules_are_split():
    assert on_ranks(split_some, 2, LAYOUTS["tp2"][1])[0] == {"1", "2", "3"}


class Checkpointed(Net):
    def forward(self, inputs):
        hidden = self.inlet(inputs)
        for block in self.blocks[:2]:
            hidden = hidden + smp.patches.checkpoint.checkpoint(block, hidden)
        hidden = smp.checkpoint_sequential(nn.Sequential(*self.blocks[2:]), hidden, strategy="group_2")
        return self.outlet(hidden)


def recomputed(parameters):
    torch.manual_seed(0)
    model, optimizer = begin(parameters, Checkpointed())
    smp.set_activation_checkpointing(model.module.blocks[3])
    for batch in batches(2):
        train_step(model, *batch)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_activations_are_checkpointed():
    torch.manual_seed(0)
    twin = Checkpointed()
    _, weights = plain(twin, parts=4, steps=2)
    for found in on_ranks(recomputed, 2, PP2):
        assert_same(found, weights, rtol=1e-6, atol=1e-7)


# --- replicas -------------------------------------------------------------------------------------------------------


def hooked(parameters, hook):
    model, optimizer = begin(parameters)
    model.register_comm_hook(None, hook)
    with model.join():
        data, targets = batches()[0]
        train_step(model, data[smp.rdp_rank() :: 2], targets[smp.rdp_rank() :: 2])
        optimizer.step()
    with pytest.raises(UnsupportedError, match="after the first step"):
        model.register_comm_hook(None, hook)
    return model.state_dict()


def own_hook(state, bucket):
    raise AssertionError


def refuses(parameters):
    model, _ = begin(parameters)
    with pytest.raises(UnsupportedError, match="`register_comm_hook` got `own_hook`, but gradients are summed over st"):
        model.register_comm_hook(None, own_hook)


def test_communication_hooks_of_pytorch_say_the_dtype():
    parameters = LAYOUTS["replicas2"][1]
    _, weights = plain(replicas=2, steps=1)
    exact = on_ranks(hooked, 2, parameters, default_hooks.allreduce_hook)[0]
    assert_same(exact, weights)
    rounded = on_ranks(hooked, 2, parameters, default_hooks.bf16_compress_hook)[0]
    assert any(not torch.equal(rounded[name], weights[name]) for name in weights)
    assert_same(rounded, weights, rtol=0.05, atol=0.05)
    on_ranks(refuses, 2, parameters)


def shuffled(parameters):
    model, optimizer = begin(parameters)
    for data, targets in batches():
        if smp.rank() != smp.get_mp_group()[0]:  # another order on each other rank
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(smp.rank()))
            data, targets = data[order], targets[order]
        optimizer.zero_grad()
        train_step(model, data, targets)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_ranks_of_a_replica_use_the_batches_of_the_first_as_in_sagemakers_library(layout):
    ranks, parameters = LAYOUTS[layout]
    _, weights = plain()
    for found in on_ranks(shuffled, ranks, parameters):
        assert_same(found, weights, rtol=1e-5, atol=1e-6)


def lamb(parameters, kind):
    smp.init(parameters)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(getattr(smp.optimizers, kind)(model.parameters(), lr=0.01, weight_decay=0.01))
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        losses.append(train_step(model, *batch)[1].reduce_mean())
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("kind", ["FusedLAMB", "FusedNovoGrad"])
def test_sagemakers_optimizers_train_as_in_one_process(kind):
    twin = net()
    optimizer = getattr(smp.optimizers, kind)(twin.parameters(), lr=0.01, weight_decay=0.01)
    for data, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(twin(data), targets).backward()
        optimizer.step()
    for found in on_ranks(lamb, 2, PP2, kind):
        assert_same(found, twin.state_dict(), rtol=1e-5, atol=1e-6)


# --- layers ---------------------------------------------------------------------------------------------------------

SIZES = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 50,
    "num_positions": 16,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
}


def head(**options):
    torch.manual_seed(0)
    return smp.nn.DistributedTransformerLMHead(**{**SIZES, **options})


def tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 50, (4, 16), generator=generator)


@smp.step
def language_step(model, ids, mask):
    loss, _ = model((ids, mask, None, None, ids))
    model.backward(loss)
    return loss


def language(parameters, options):
    smp.init(parameters)
    model = smp.DistributedModel(head(**options))
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
    losses = []
    for _ in range(3):
        losses.append(language_step(model, tokens(), torch.zeros(4, 16)).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
    split = {name.rpartition(".")[0] for name, each in model.named_parameters() if model.is_distributed_parameter(each)}
    return torch.stack(losses), model.state_dict(), {name.partition("0.")[2] for name in split if "layers.0" in name}


ATTENTION = ("query", "key", "value", "dense")
SPLIT = {"output.dense1", "output.dense2"}


@pytest.mark.parametrize("biased", [False, True], ids=["positions", "alibi"])
@pytest.mark.parametrize("layout", ["pp2", "tp2", "sdp2"])
def test_sagemakers_transformer_trains_as_in_one_process(layout, biased):
    ranks, parameters = LAYOUTS[layout]
    parameters = {**parameters, **({"microbatches": 2} if layout == "pp2" else {})}
    options = {"causal_mask_size": 16, "pre_layernorm": True, "use_alibi": biased}
    twin = head(**options)
    optimizer = adamw(twin.parameters())
    losses = []
    for _ in range(3):
        loss, _ = twin((tokens(), torch.zeros(4, 16), None, None, tokens()))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    for found, weights, split in on_ranks(language, ranks, parameters, options):
        if layout == "tp2":
            assert split == (SPLIT if biased else SPLIT | {f"attention.{name}" for name in ATTENTION})
        torch.testing.assert_close(found, torch.stack(losses), rtol=1e-4, atol=1e-5)
        assert_same(weights, twin.state_dict(), rtol=1e-2, atol=1e-3)


def test_masks_hide_positions():
    model = head().eval()
    mask = torch.zeros(4, 16)
    mask[:, 12:] = 1
    ids = tokens()
    other = ids.clone()
    other[:, 12:] = 0
    torch.testing.assert_close(
        model((ids, mask, None, None))[:, :12], model((other, mask, None, None))[:, :12], rtol=1e-5, atol=1e-5
    )
    causal = head(causal_mask_size=16).eval()
    torch.testing.assert_close(
        causal((ids, None, None, None))[:, :12], causal((other, None, None, None))[:, :12], rtol=1e-5, atol=1e-5
    )
    biased = head(use_alibi=True, num_token_types=2, causal_mask_size=16).eval()
    assert biased((ids, None, torch.ones_like(ids), None)).shape == (4, 16, 50)


def test_cross_attention_reads_another_sequence():
    layer = smp.nn.DistributedTransformerLayer(4, 8, 32, 64, add_cross_attention=True).eval()
    hidden, other = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    mask, other_mask = torch.zeros(2, 1, 1, 5), torch.zeros(2, 1, 1, 7)
    found = layer((hidden, other, mask, other_mask))
    assert found[0].shape == hidden.shape
    assert found[1] is other
    assert not torch.equal(layer((hidden, other + 1, mask, other_mask))[0], found[0])


def test_flash_attention_takes_queries_keys_and_values_in_one():
    qkv = torch.randn(2, 6, 3, 4, 8)
    layer = smp.nn.FlashAttentionLayer(0.0, attention_head_size=8)
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(layer(qkv, None, True), expected)
    numbered = smp.nn.FlashAttentionLayer(0.0, scale_attn_by_layer_idx=True, layer_idx=1)
    assert not torch.allclose(numbered(qkv), layer(qkv))
    with pytest.raises(ConfigError, match="needs `layer_idx`"):
        smp.nn.FlashAttentionLayer(scale_attn_by_layer_idx=True)


def test_translations_change_nothing_and_know_sagemakers_names():
    assert translate_state_dict_to_hf_gpt2({"wte.weight": 1}, max_seq_len=4) == {"wte.weight": 1}
    assert translate_hf_gptj_state_dict_to_smdistributed({"wte.weight": 1}, 4) == {"wte.weight": 1}  # its older name
    with pytest.raises(CheckpointError, match="is a name of SageMaker's layers. Read what its library has written wit"):
        translate_state_dict_to_hf_gpt2({"transformer.seq_layers.0.weight": 1})


def test_layers_are_those_of_pytorch():
    linear = smp.nn.DistributedLinear(3, 5)
    assert isinstance(linear, nn.Linear)
    table = smp.nn.DistributedEmbedding(1000, 64, padding_idx=0)
    assert abs(table.weight.detach().std().item() - 0.02) < 1e-3
    assert not table.weight[0].any()
    assert isinstance(smp.nn.FusedLayerNorm(4), nn.LayerNorm)
