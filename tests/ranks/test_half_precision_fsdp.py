"""``bf16=True`` beside PyTorch's FSDP2 with ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)``.

Both keep float32 shards, gather half precision for the same modules, cast their arguments, and add up in float32.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.ranks.test_state_sharding import assert_equal

STEPS, SAMPLES, LENGTH, VOCABULARY, WIDTH, HEADS = 3, 4, 8, 32, 16, 2
UNITS = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"sharded_data_parallel_degree": 2},
    "shards gathered once": {"sharded_data_parallel_degree": 2, "sdp_gather": "step"},
    "replicas": {},
    "replicas that deal out": {"shard_optimizer_state": True},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.outputs = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outputs(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens[:, :-1])
        assert logits.dtype == torch.bfloat16
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def tokens_for(step: int) -> Tensor:
    """Other samples on each rank."""
    generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)


def made(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01, eps=1e-3)


def fsdp(microbatches: int) -> Any:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    model = Transformer()
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*UNITS, ""):
        fully_shard(model.get_submodule(unit), mesh=mesh, mp_policy=policy)
    optimizer = made(model)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for part in tokens_for(step).chunk(microbatches):
            mine = model.loss(part) / microbatches
            mine.backward()
            loss += mine.item()
        losses.append(loss)
        gradients.append({name: each.grad.full_tensor().clone() for name, each in model.named_parameters()})
        optimizer.step()
    return losses, gradients, {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def ours(microbatches: int, options: dict[str, Any]) -> Any:
    model = Transformer()
    optimizer = made(model)
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, microbatches=microbatches, bf16=True, **options))
    engine.gradients_are_seen = True
    engine.attach(model, [optimizer])
    assert [unit.name for unit in engine.layout.units] == UNITS
    losses, gradients = [], []
    for step in range(STEPS):
        result = engine.train_step(model.loss, tokens_for(step), loss_of=lambda loss: loss)
        assert result.loss is not None
        losses.append(result.loss.item())
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)

        def see() -> None:
            gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})

        engine.run_hook(see)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    engine.restore_everywhere()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.close()
    return losses, gradients, weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("microbatches", "tolerance"), [(1, 0.0), (2, 1e-6)])  # these are added up in another order
def test_losses_gradients_and_weights_are_those_of_fsdp(microbatches, tolerance, layout):
    expected = run_ranks(fsdp, 2, microbatches)
    found = run_ranks(ours, 2, microbatches, LAYOUTS[layout])
    for (losses, gradients, weights), (like, of_them, their) in zip(found, expected, strict=True):
        assert losses == pytest.approx(like, rel=tolerance, abs=0.0)
        assert losses[-1] != losses[0]
        for mine, theirs in zip(gradients, of_them, strict=True):
            assert {tensor.dtype for tensor in mine.values()} == {torch.float32}
            assert_equal(mine, theirs, tolerance=tolerance)
        assert_equal(weights, their, tolerance=tolerance)
