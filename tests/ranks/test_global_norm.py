"""The norm of all gradients is one number: that of one process, on every rank, whatever is spread over them.

Tied weights count once, as do those that ranks have alike; pieces and parts count together; what has no gradient does
not count.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks
from tests.parity.models import Text as Model
from tests.parity.models import batch_for
from tests.ranks.test_tensor_parallel_engine import Setting, engine_for

SHARDED, DEALT_OUT = ("sharded_data_parallel_degree", 2), ("shard_optimizer_state", True)
LAYOUTS = {
    "one rank": Setting(1),
    "pp2": Setting(1, pp=2),
    "pp4": Setting(1, pp=4),
    "dp2": Setting(1, dp=2),
    "sdp2": Setting(1, dp=2, options=(SHARDED,)),
    "zero1": Setting(1, dp=2, options=(DEALT_OUT,)),
    "t2": Setting(2),
    "t2 along the sequence": Setting(2, options=(("optimize", "memory"),)),
    "pp2 dp2": Setting(1, pp=2, dp=2),
    "pp2 sdp2": Setting(1, pp=2, dp=2, options=(SHARDED,)),
    "pp2 sdp2 per use": Setting(1, pp=2, dp=2, options=(SHARDED, ("sdp_gather", "use"))),
    "pp2 zero1": Setting(1, pp=2, dp=2, options=(DEALT_OUT,)),
    "sdp2 dp2": Setting(1, dp=4, options=(SHARDED,)),
    "sdp2 zero1": Setting(1, dp=4, options=(SHARDED, DEALT_OUT)),
    "t2 pp2": Setting(2, pp=2),
    "t2 sdp2": Setting(2, dp=2, options=(SHARDED,)),
    "t2 zero1": Setting(2, dp=2, options=(DEALT_OUT,)),
}
NORM_TYPES = (2.0, 1.0, 3.5, math.inf)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(tied=True)
    model.blocks[1].norm.weight.requires_grad_(False)
    model.blocks[2].unused = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def chosen(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    return {
        "all": list(model.parameters()),
        "tied": [model.embed.weight],
        "frozen": [model.blocks[1].norm.weight],
        "of one block": list(model.blocks[3].parameters()),
    }


def norms_of(model: nn.Module, norm: Callable[[list[nn.Parameter], float], Tensor]) -> dict[str, list[float]]:
    return {
        name: [norm(parameters, norm_type).item() for norm_type in NORM_TYPES]
        for name, parameters in chosen(model).items()
    }


def norm_of_torch(parameters: list[nn.Parameter], norm_type: float) -> Tensor:
    return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type)


def one_process(setting: Setting) -> Any:
    model, optimizer = built()
    for replica in range(setting.dp):
        parts, _ = split(batch_for("text", replica, 4), setting.microbatches)
        for part in parts:
            (model.loss(part) / (setting.microbatches * setting.dp)).backward()
    norms = norms_of(model, norm_of_torch)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return norms, model.state_dict()


def on_rank(setting: Setting) -> Any:
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    batch = batch_for("text", engine.mesh.dp_rank, 4)
    engine.train_step(model.loss, batch, loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    norms = norms_of(model, lambda parameters, norm_type: engine.clip_grad_norm_(parameters, 1e9, norm_type))
    engine.clip_grad_norm_(model.parameters(), 0.01)
    engine.begin_update(optimizer)
    optimizer.step()
    engine.end_update(optimizer)
    state = engine.saved.full_state_dict()
    engine.close()
    return norms, state


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_is_that_of_one_process_on_every_rank(name):
    setting = LAYOUTS[name]
    expected, weights = one_process(setting)
    assert expected["frozen"] == [0.0] * len(NORM_TYPES)
    ranks = run_ranks(on_rank, setting.ranks, setting)
    for norms, _ in ranks:
        assert norms == ranks[0][0]
        for kind, numbers in expected.items():
            assert norms[kind] == pytest.approx(numbers, rel=1e-6), kind
    torch.testing.assert_close(ranks[0][1], weights, rtol=1e-6, atol=1e-7)
