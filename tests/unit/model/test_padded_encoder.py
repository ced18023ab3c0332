"""Encoders with a padding mask make no nested tensors, and leave the values that nested tensors leave."""

import warnings

import pytest
import torch
from torch import nn

from smp_strategy.model.padded_encoder import padded_encoders

LENGTHS = torch.tensor([5, 3, 1, 4])
AT_ENDS = torch.arange(5) >= LENGTHS[:, None]
HOLES = torch.arange(5) == LENGTHS[:, None] - 1
MASKS = {"at ends": AT_ENDS, "in between": HOLES, "numbers": AT_ENDS * -2.0, "nothing": torch.zeros_like(AT_ENDS)}


class Own(nn.TransformerEncoder):
    def forward(self, x, **masks):
        return super().forward(x.tanh(), **masks)


def encoder_of(kind=nn.TransformerEncoder, *, norm=True, **options):
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = kind(layer, 3, norm=nn.LayerNorm(8) if norm else None, **options)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return encoder


def both(encoder, *args, **kwargs):
    """Results of PyTorch's own form and of this one, with the types of what the layers were given."""
    given = []
    for part in encoder.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.register_forward_pre_hook(lambda _, args: given.append(args[0].is_nested))
    torch.manual_seed(1)
    expected = encoder(*args, **kwargs)
    was_nested, given[:] = any(given), []
    with padded_encoders(lambda: True):
        torch.manual_seed(1)
        found = encoder(*args, **kwargs)
    assert not any(given)
    return expected, found, was_nested


@pytest.mark.parametrize("kind", [nn.TransformerEncoder, Own])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"norm": False}, {"mask_check": False}], ids=str)
def test_all_positions_are_as_nested_tensors_leave_them(options, mask, kind):
    encoder, x = encoder_of(kind, **options).eval(), torch.randn(4, 5, 8)
    with torch.no_grad():
        expected, found, was_nested = both(encoder, x, src_key_padding_mask=MASKS[mask])
    assert was_nested == (mask != "in between" or "mask_check" in options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_makes_no_nested_tensors_is_left_alone():
    padding, x = {"src_key_padding_mask": AT_ENDS}, torch.randn(4, 5, 8)
    training = encoder_of()
    expected, found, _ = both(training, x, **padding)
    assert torch.equal(found, expected)
    expected, found, _ = both(training.eval(), x, **padding)  # with gradients
    assert torch.equal(found, expected)
    with torch.no_grad():
        expected, found, _ = both(training, x, torch.zeros(5, 5), **padding)
        assert torch.equal(found, expected)
        expected, found, _ = both(encoder_of(enable_nested_tensor=False).eval(), x, **padding)
        assert torch.equal(found, expected)


def test_frozen_encoders_and_whole_transformers():
    padding, x = {"src_key_padding_mask": AT_ENDS}, torch.randn(4, 5, 8)
    expected, found, was_nested = both(encoder_of().eval().requires_grad_(requires_grad=False), x, **padding)
    assert was_nested
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.manual_seed(0)
    whole = nn.Transformer(8, 2, 2, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        expected, found, was_nested = both(whole, x, x[:, :3], **padding)
    assert was_nested
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_class_is_given_back():
    original = nn.TransformerEncoder.forward
    with padded_encoders(lambda: True):
        with padded_encoders(lambda: False):
            assert nn.TransformerEncoder.forward is not original
        assert nn.TransformerEncoder.forward is not original
    assert nn.TransformerEncoder.forward is original
