"""Split layers that look dense for a moment."""

import torch
from torch import nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.split import split_layers


def test_modules_look_dense_and_then_as_they_do_now():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    before = [(type(part), dict(vars(part))) for part in model.modules()]
    split = split_layers(model, TensorGroup(None, rank=0, size=2))
    after = [(type(part), dict(vars(part))) for part in model.modules()]
    assert before != after
    with split.appearance.dense():
        assert [(type(part), dict(vars(part))) for part in model.modules()] == before
        assert model.self_attn.in_proj_weight.shape == (12, 8)  # values stay parts
    assert [(type(part), dict(vars(part))) for part in model.modules()] == after


def test_what_has_changed_since_for_other_reasons_stays():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    split = split_layers(model, TensorGroup(None, rank=0, size=2))
    model.eval()
    model.linear1.note = torch.ones(1)
    with split.appearance.dense():
        assert type(model.linear1) is nn.Linear
        assert not model.linear1.training
    assert model.linear1.note == 1
