"""Transformers whose residual stream is split along the sequence, against the dense ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelHead
from smp_strategy.tensor_parallel.sequence_parallel import SequenceParallel
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor
from smp_strategy.testing import run_ranks

BATCH, HIDDEN, HEADS, LAYERS, VOCABULARY = 2, 16, 4, 2, 11
LENGTH = 7


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = _Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        x = hidden_states + self.dropout(self.attention(self.norm1(hidden_states))) * scale
        y = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        y += x
        return y, None


class _Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([_Block(dropout) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.recomputes = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            call: Callable[..., Any] = block
            if self.recomputes:
                call = lambda *args, block=block, **kwargs: checkpoint(block, *args, use_reentrant=False, **kwargs)  # noqa: E731
            x, _ = call(x) if number else call(hidden_states=x, scale=1.0)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def _made(dropout: float = 0.0) -> _Transformer:
    torch.manual_seed(0)
    model = _Transformer(dropout)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    return model


def _split(model: _Transformer, group: TensorGroup, how: str) -> _Transformer:
    """How: `tensor`; `sequence`: between regions split; `head`: to the last norm and on to logits that are split."""
    for block in model.blocks:
        attention = block.attention
        attention.heads //= group.size
        for layer in (attention.q, attention.k, attention.v):
            ColumnParallelLinear.from_dense(layer, group, granule=HIDDEN // HEADS, shares_input=True)
        RowParallelLinear.from_dense(attention.o, group, granule=HIDDEN // HEADS)
        ColumnParallelLinear.from_dense(block.up, group)
        RowParallelLinear.from_dense(block.down, group)
    if how == "sequence":
        SequenceParallel(list(model.blocks), group)
    if how == "head":
        VocabParallelHead.from_dense(model.head, group)
        SequenceParallel([*model.blocks, model.norm], group, ends_whole=False)
    return model


def _tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(7))


def _gradients(model: _Transformer, wholes: _Transformer, group: TensorGroup) -> dict[str, tuple[Tensor, Tensor]]:
    """Those of ``model``, and of ``wholes`` cut likewise."""
    found = {}
    for name, module in model.named_modules():
        cuts = getattr(module, "cuts", {})
        for key, parameter in module._parameters.items():
            if parameter is not None:
                whole = wholes.get_submodule(name)._parameters[key].grad
                found[f"{name}.{key}"] = parameter.grad, cuts[key].part(whole, group.rank) if key in cuts else whole
    return found


def _differences(how: str, length: int, recomputes: bool = False) -> dict[str, float]:
    group = TensorGroup(dist.group.WORLD)
    dense = _made()
    model = _split(copy.deepcopy(dense), group, how)
    model.recomputes = recomputes
    tokens = _tokens(length)
    losses = []
    for _ in range(2):  # gradients accumulate
        losses = [each(tokens) for each in (model, dense)]
        for loss in losses:
            loss.backward()
    pairs = {**_gradients(model, dense, group), "loss": (losses[0].detach(), losses[1].detach())}
    return {
        name: ((one - other).abs().max() / other.abs().max().clamp(min=1e-2)).item()
        for name, (one, other) in pairs.items()
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("how", "length"), [("sequence", LENGTH), ("head", LENGTH), ("sequence", 3), ("tensor", 4)])
def test_losses_and_all_gradients_are_those_of_the_dense_model(size: int, how: str, length: int) -> None:
    for found in run_ranks(_differences, size, how, length):
        assert len(found) == 35
        assert {name: difference for name, difference in found.items() if not difference < 2e-5} == {}


@pytest.mark.parametrize("how", ["sequence", "head"])
def test_recomputed_layers_have_the_same_gradients(how: str) -> None:
    for found in run_ranks(_differences, 2, how, LENGTH, True):
        assert {name: difference for name, difference in found.items() if not difference < 2e-5} == {}


def _kept(how: str) -> int:
    model = _split(_made(), TensorGroup(dist.group.WORLD), how)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    tensors = []  # alive, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(_tokens(64))
    return sum(kept.values())


def test_activations_that_are_kept_are_nearly_divided_by_the_ranks() -> None:
    tensor, sequence, head = (max(run_ranks(_kept, 2, how)) for how in ("tensor", "sequence", "head"))
    (whole,) = run_ranks(_kept, 1, "tensor")
    assert tensor > 0.65 * whole
    assert sequence < 0.55 * whole
    assert head < 0.52 * whole


def _sent(how: str) -> tuple[int, int, int]:
    group = TensorGroup(dist.group.WORLD)
    model = _split(_made(), group, how)
    loss = model(_tokens(8))
    forward, group.sent_bytes = group.sent_bytes, 0
    sums: list[Tensor] = []
    add_up = group.sum
    group.sum = lambda tensor: (sums.append(tensor), add_up(tensor))[1]
    loss.backward()
    return forward, group.sent_bytes, len(sums)


def test_what_is_sent_is_parts_of_the_stream_and_one_sum_for_the_norms_of_each_layer() -> None:
    whole, norms = BATCH * 8 * HIDDEN * 4, 3 * HIDDEN * 4
    part = whole // 2
    (forward, backward, sums), _ = run_ranks(_sent, 2, "sequence")
    # Each of 4 regions gathers parts and adds up wholes; at the end the stream is put together.
    assert forward == 4 * (part + whole) + part
    # Likewise, and gathers once more; at the beginning the gradient of the stream is put together.
    assert backward == 4 * (part + whole + part) + part + LAYERS * norms
    assert sums == LAYERS


def _dropped() -> tuple[list[float], Tensor]:
    group = TensorGroup(dist.group.WORLD)
    losses = []
    for recomputes in (False, True):
        model = _split(_made(dropout=0.5), group, "sequence")
        model.recomputes = recomputes
        torch.manual_seed(3)
        loss = model(_tokens(LENGTH))
        after = torch.rand(2)
        loss.backward()
        losses.append([loss.item(), *(p.grad.double().sum().item() for p in model.norm.parameters()), *after.tolist()])
        losses.append([p.grad.double().sum().item() for p in model.blocks[0].norm1.parameters()])
    return losses


def test_dropout_leaves_ranks_alike_and_is_repeated_when_layers_are_recomputed() -> None:
    first, second = run_ranks(_dropped, 2)
    assert first == second
    assert first[:2] == first[2:]


def _evaluated() -> float:
    group = TensorGroup(dist.group.WORLD)
    dense = _made().eval()
    model = _split(copy.deepcopy(dense), group, "head")
    differences = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            differences.append((model(_tokens(LENGTH)) - dense(_tokens(LENGTH))).abs().item())
    return max(differences)


def test_evaluation_without_gradients_gives_the_same_loss() -> None:
    assert max(run_ranks(_evaluated, 2)) < 1e-5


def _removed() -> tuple[bool, float, list[str]]:
    group = TensorGroup(dist.group.WORLD)
    dense = _made()
    model = _split(copy.deepcopy(dense), group, "tensor")
    parallel = SequenceParallel(list(model.blocks), group)
    seen: list[type] = []
    handle = model.blocks[0].norm2.register_forward_hook(lambda _, inputs, output: seen.append(type(output)))
    model(_tokens(LENGTH))
    parallel.remove()
    loss = model(_tokens(LENGTH))
    handle.remove()
    for module in list(model.modules()):
        if hasattr(module, "to_dense"):
            module.to_dense()
    return seen == [SplitTensor, Tensor], (loss - dense(_tokens(LENGTH))).abs().item(), list(vars(model.blocks[0].down))


def test_layers_are_as_they_were_when_it_is_removed() -> None:
    for was_split, difference, attributes in run_ranks(_removed, 2):
        assert was_split
        assert difference < 1e-5
        assert "splits_output" not in attributes


def _without_stream(argument: Any) -> None:
    group = TensorGroup(dist.group.WORLD)
    layer = nn.LayerNorm(4)
    SequenceParallel([layer], group)
    layer(argument)


@pytest.mark.parametrize(("argument", "described"), [(torch.ones(4), r"of size \[4\]"), ("text", "str")])
def test_a_layer_that_does_not_get_the_stream_is_an_error(argument: Any, described: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"Sequence parallelism of LayerNorm.*along dim 1, but is {described}\. Give"
    ):
        run_ranks(_without_stream, 2, argument)
