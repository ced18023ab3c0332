"""PyTorch's own attention and transformer layers, split over ranks, compute what they compute as a whole."""

import copy
import warnings

import pytest
import torch
from torch import nn

from smp_strategy.tensor_parallel.split import split_layers
from smp_strategy.testing import run_ranks

from .split_layers import assert_close, group_of_all

TOLERANCE = 1e-5
QUERY, KEY = 5, 7
BOOLS = torch.ones(QUERY, KEY, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 6 + [True]])
PER_HEAD = torch.arange(2 * 4 * QUERY * KEY).reshape(8, QUERY, KEY).sin()

# Options of the layer, and of the call.
ATTENTIONS = {
    "plain": ({}, {}),
    "without weights": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "batch first": ({"batch_first": True}, {}),
    "without bias": ({"bias": False}, {}),
    "with other widths of keys and values": ({"kdim": 6, "vdim": 10}, {}),
    "with learned keys and values": ({"add_bias_kv": True}, {"attn_mask": BOOLS}),
    "with a key of zeros": ({"add_zero_attn": True}, {"key_padding_mask": PADDING, "need_weights": False}),
    "mask": ({}, {"attn_mask": BOOLS, "need_weights": False}),
    "causal mask as a hint": ({}, {"attn_mask": BOOLS, "is_causal": True, "need_weights": False}),
    "causal mask with weights": ({}, {"attn_mask": BOOLS, "is_causal": True}),
    "mask of numbers": ({}, {"attn_mask": PER_HEAD[0]}),
    "mask of each head": ({}, {"attn_mask": PER_HEAD}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "both masks": ({}, {"key_padding_mask": PADDING, "attn_mask": BOOLS, "need_weights": False}),
}


def gradients_agree(split, model, dense, group):
    expected = dict(dense.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        found = parameter.grad
        if parameter in split.cuts:
            found = split.cuts[parameter].join(group.objects(found))
        assert_close(found, expected[name].grad, TOLERANCE)


def attend(name):
    options, call = ATTENTIONS[name]
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(16, 4, **options)
    if dense.in_proj_bias is not None:
        nn.init.normal_(dense.out_proj.bias)
        nn.init.normal_(dense.in_proj_bias)
    model = copy.deepcopy(dense)
    group = group_of_all()
    split = split_layers(nn.ModuleList([model]), group)
    assert model.num_heads == 4, "code that makes a mask for each head asks for it"
    assert model.out_proj.in_features == 16 // group.size
    sizes = [(QUERY, 16), (KEY, options.get("kdim", 16)), (KEY, options.get("vdim", 16))]
    inputs = [torch.randn(2, length, width) for length, width in sizes]
    if not options.get("batch_first"):
        inputs = [each.transpose(0, 1) for each in inputs]
    results = []
    for layer in (dense, model):
        given = [each.detach().clone().requires_grad_() for each in inputs]
        output, weights = layer(*given, **call)
        loss = output.sin().sum() + (0 if weights is None else weights.cos().sum())
        loss.backward()
        results.append([output, *([] if weights is None else [weights]), *(each.grad for each in given)])
    assert len(results[0]) == len(results[1])
    for expected, found in zip(*results, strict=True):
        assert_close(found.detach(), expected.detach(), TOLERANCE)
    gradients_agree(split, model, dense, group)
    split.to_dense()
    assert type(model) is nn.MultiheadAttention
    assert type(model.out_proj) is type(dense.out_proj)
    plain = {key: value for key, value in vars(model).items() if isinstance(value, (bool, int))}
    assert plain == {key: value for key, value in vars(dense).items() if isinstance(value, (bool, int))}
    for one, other in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_multihead_attention_split_is_what_it_is_as_a_whole(name):
    run_ranks(attend, 2, name)


def test_multihead_attention_is_split_over_four_ranks():
    run_ranks(attend, 4, "mask of each head")


def attend_to_itself():
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(16, 4)
    model = copy.deepcopy(dense)
    group = group_of_all()
    split = split_layers(nn.ModuleList([model]), group)
    x = torch.randn(QUERY, 16)
    results = []
    for layer in (dense, model):
        given = x.clone().requires_grad_()
        before = group.sent_bytes
        output, _ = layer(given, given, given, need_weights=False)
        output.sin().sum().backward()
        results.append((output, given.grad))
    for expected, found in zip(*results, strict=True):
        assert_close(found.detach(), expected.detach(), TOLERANCE)
    assert group.sent_bytes - before == 2 * x.nbytes, "one sum forward, one backward"
    gradients_agree(split, model, dense, group)


def test_self_attention_without_a_batch_sends_one_sum_forward_and_one_backward():
    run_ranks(attend_to_itself, 2)


def transform(kind, norm_first, activation):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "activation": activation}
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(16, 4, 32, **options)
        dense = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    else:
        dense = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **options), 2)
    for index, parameter in enumerate(dense.parameters()):
        nn.init.normal_(parameter, std=0.1 + 0.01 * index)
    model = copy.deepcopy(dense)
    group = group_of_all()
    split = split_layers(model, group)
    assert not split.report.skipped
    x, memory = torch.randn(2, QUERY, 16), torch.randn(2, KEY, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(QUERY)
    results = []
    for module in (dense, model):
        given = x.clone().requires_grad_()
        args = (given, mask) if kind == "encoder" else (given, memory, mask)
        output = module(*args)
        output.sin().sum().backward()
        results.append((output, given.grad))
    for expected, found in zip(*results, strict=True):
        assert_close(found.detach(), expected.detach(), TOLERANCE)
    gradients_agree(split, model, dense, group)
    if kind == "encoder":
        # The dense model takes its short cut by nested tensors, with a warning.
        warnings.simplefilter("ignore")
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            expected, found = (m.eval()(x, src_key_padding_mask=padding) for m in (dense, model))
        assert_close(found, expected, TOLERANCE)
    split.to_dense()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))
    with torch.no_grad():
        if kind == "encoder":
            assert torch.equal(model(x, src_key_padding_mask=padding), expected), "takes the short cut again"


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
def test_transformer_layers_are_split_and_take_no_short_cut_in_inference(kind, norm_first, activation):
    run_ranks(transform, 2, kind, norm_first, activation)


def drop():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.5, batch_first=True)
    group = group_of_all()
    split_layers(model, group)
    inside, outside = [], []
    model.dropout.register_forward_hook(lambda module, args, output: inside.append(output == 0))
    model.dropout2.register_forward_hook(lambda module, args, output: outside.append(output == 0))
    with torch.no_grad():
        model(torch.randn(2, QUERY, 16))
    others = group.objects((inside[0], outside[0], torch.get_rng_state()))
    (first, first_outside, first_state), (second, second_outside, second_state) = others
    # Zeros of the activation are zero on both.
    assert not torch.equal(first, second)
    assert torch.equal(first_outside, second_outside)
    assert torch.equal(first_state, second_state)


def test_dropout_differs_where_activations_are_split_and_is_the_same_where_they_are_whole():
    run_ranks(drop, 2)
