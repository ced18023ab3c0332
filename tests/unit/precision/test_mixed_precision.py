"""Units that see half-precision copies of their parameters while they run."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.precision.dtypes import compute_dtype, dtypes_in_use, halve, halved, reduce_dtype, summed_dtype
from smp_strategy.precision.master_weights import Fp32Gradients
from smp_strategy.precision.mixed_precision import MixedPrecision


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.linear.weight
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.linear.weight.dtype, self.tied.weight.dtype, self.norm.weight.dtype]
        return self.norm(self.tied(self.linear(x)))


def kept() -> tuple[Block, MixedPrecision, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    block, mixed_precision = Block(), MixedPrecision(torch.bfloat16, "cpu")
    mixed_precision.keep(list(block.parameters()))
    return block, mixed_precision, mixed_precision.around(block, block.forward)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_a_unit_sees_half_precision_and_others_see_masters():
    block, _, run = kept()
    before = list(block.parameters())
    found = run(X)
    assert found.dtype == torch.bfloat16
    assert block.seen == [torch.bfloat16] * 3 + [torch.float32]
    assert all(now is then for now, then in zip(block.parameters(), before, strict=True))
    assert {parameter.dtype for parameter in before} == {torch.float32}


def test_the_places_hold_masters_again_after_an_exception():
    block, _, run = kept()
    weight = block.linear.weight
    with pytest.raises(RuntimeError, match="shapes"):
        run(torch.ones(3, 5))
    assert block.linear.weight is weight


def test_autocast_is_off_inside_of_units():
    block, mixed_precision, _ = kept()
    seen = []
    run = mixed_precision.around(block, lambda x: seen.append(torch.is_autocast_enabled("cpu")))
    mixed_precision.around_step(run)(X)
    assert seen == [False]


def test_copies_are_made_once_and_filled_again_when_masters_have_changed():
    block, mixed_precision, run = kept()
    run(X)
    first = mixed_precision._copies[id(block.linear.weight)].half
    run(X)
    assert mixed_precision._copies[id(block.linear.weight)].half is first
    with torch.no_grad():
        block.linear.weight.add_(1.0)
    run(X)
    assert mixed_precision._copies[id(block.linear.weight)].half is first
    assert torch.equal(first, block.linear.weight.bfloat16())
    block.linear.weight.data.add_(1.0)  # its version does not tell
    mixed_precision.refresh()
    run(X)
    assert torch.equal(first, block.linear.weight.bfloat16())


def test_a_graph_that_has_saved_old_values_is_told():
    block, _, run = kept()
    result = run(X).sum()
    with torch.no_grad():
        block.linear.weight.add_(1.0)
    run(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_a_graph_lives_on_where_nothing_has_changed():
    _, mixed_precision, run = kept()
    result = run(X).sum()
    mixed_precision.refresh()
    run(X)
    result.backward()


def test_gradients_are_added_up_in_float32():
    block, _, run = kept()
    block.norm.eval()
    total = torch.zeros(4)
    for number in range(5):
        block.zero_grad()
        run(X * number).square().sum().backward()
        assert block.linear.bias.grad.dtype == torch.float32
        assert torch.equal(block.linear.bias.grad, block.linear.bias.grad.bfloat16())
        total += block.linear.bias.grad
    block.zero_grad()
    for number in range(5):
        run(X * number).square().sum().backward()
    assert torch.equal(block.linear.bias.grad, total)
    assert not torch.equal(total, total.bfloat16())


def test_frozen_parameters_get_no_gradients_and_may_be_unfrozen():
    block, _, run = kept()
    block.linear.requires_grad_(False)
    run(X).sum().backward()
    assert block.linear.bias.grad is None
    block.linear.requires_grad_(True)
    run(X).sum().backward()
    assert block.linear.bias.grad is not None


def test_copies_can_be_let_go_of():
    block, mixed_precision, run = kept()
    run(X)
    assert mixed_precision.held_bytes == 2 * (16 + 4)
    mixed_precision.let_go()
    assert mixed_precision.held_bytes == 0
    assert run(X).dtype == torch.bfloat16  # cast for the call
    assert mixed_precision.held_bytes == 0


def test_a_recurrent_layer_computes_in_half_precision():
    layer, mixed_precision = nn.LSTM(4, 4, batch_first=True), MixedPrecision(torch.bfloat16, "cpu")
    mixed_precision.keep(list(layer.parameters()))
    found, _ = mixed_precision.around(layer, layer.forward)(X[None])
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    assert layer(X[None])[0].dtype == torch.float32


def test_options_say_which_dtypes():
    assert compute_dtype(SMPConfig()) is None
    assert compute_dtype(SMPConfig(bf16=True)) == torch.bfloat16
    assert compute_dtype(SMPConfig(fp16=True)) == compute_dtype(SMPConfig(fp16_params=True)) == torch.float16
    assert reduce_dtype(SMPConfig()) is None
    assert reduce_dtype(SMPConfig(reduce_dtype="bfloat16")) == torch.bfloat16
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [summed_dtype(kind, "float32") for kind in kinds] == [torch.float32] * 3 + [torch.float64]
    assert [summed_dtype(kind, "parameter") for kind in kinds] == list(kinds)


def test_a_module_can_be_halved_and_halved_for_a_while():
    block = Block()
    seen = {"linear.weight": torch.bfloat16, "linear.bias": torch.bfloat16}
    assert dtypes_in_use(block, torch.bfloat16) == seen
    weight = block.linear.weight.clone()
    with halved(block, torch.bfloat16):
        assert block.linear.weight.dtype == torch.bfloat16
        assert dtypes_in_use(block, torch.bfloat16) == {}
    assert torch.equal(block.linear.weight, weight)
    halve(block, torch.bfloat16)
    assert (block.linear.weight.dtype, block.norm.weight.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_of_half_precision_parameters_are_wide_but_for_optimizers():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    wide = Fp32Gradients([parameter, nn.Parameter(torch.ones(3))])
    factors = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    for factor in factors:
        (parameter * factor).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 258.0))  # bfloat16 would leave 256
    wide.begin_update([parameter])
    assert parameter.grad.dtype == torch.bfloat16
    optimizer.step()
    (parameter * 256).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 514.0))  # of which bfloat16 has no number
    optimizer.zero_grad()
    (parameter * 2).sum().backward()
    assert parameter.grad.dtype == torch.bfloat16  # alone
    wide.widen([parameter])
    assert parameter.grad.dtype == torch.float32
    wide.end()
    assert parameter.grad.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 4.0, dtype=torch.bfloat16))
