"""Embeddings that rescale the rows they look up (``max_norm``): a weight that changes in the forward of its layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks

BATCH = torch.arange(12).view(4, 3) % 7
NAMED = {"up": "column", "down": "row"}
LAYOUTS = {
    "2 stages": {"pipeline_parallel_degree": 2},
    "2 parts": {"tensor_parallel_degree": 2, "tensor_parallel": NAMED},
    "2 parts of 2 stages": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "tensor_parallel": NAMED},
}


class Words(nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8, max_norm=1.0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 7)
        self.looks = looks

    def loss(self, tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(self.down(self.up(self.table(tokens)).relu()).flatten(0, 1), tokens.flatten())
        return loss * 2 if self.looks and float(loss.detach()) > 0 else loss


def trained(looks: bool, options: dict[str, int]) -> dict[str, Tensor]:
    model = Words(looks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(SMPConfig(**{"pipeline_parallel_degree": 1, **options}))
    engine.attach(model, [optimizer])
    for _ in range(3):
        result = engine.train_step(model.loss, BATCH, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        optimizer.step()
    return copy.deepcopy(engine.saved.full_state_dict())


@pytest.mark.parametrize("looks", [False, True], ids=["no look at values", "a look at values"])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_are_rescaled_as_in_one_process(options, looks):
    model = Words(looks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss(BATCH)
        loss.backward()
        optimizer.step()
    ranks = options.get("pipeline_parallel_degree", 1) * options.get("tensor_parallel_degree", 1)
    found = run_ranks(trained, ranks, looks, options)[0]
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"sharded_data_parallel_degree": 2}], ids=["replicas", "shards"])
def test_replicas_that_would_rescale_rows_of_their_own_are_refused(options):
    def on_rank():
        with pytest.raises(UnsupportedError, match=r"`table\.weight` is rescaled as it is used \(`max_norm`\)"):
            trained(False, options)

    run_ranks(on_rank, 2)
