"""What optimizers are asked, and told, where parameters are spread over stages and shard groups."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.optimizer_checks import problems_of_cuts
from smp_strategy.data_parallel.optimizer_state import kept_per_element
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS
from tests.ranks.test_state_sharding import train
from tests.unit.data_parallel.optimizers import Lamb


def run(pp: int, asks: bool) -> Any:
    torch.manual_seed(0)
    model, told = MODELS["text"](), None
    trained, other = optim.AdamW(model.parameters()), Lamb(model.parameters())
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=2, sharded_data_parallel_degree=2))
    engine.attach(model, [trained])
    train(engine, model, trained, "text", range(1), None)
    if asks:
        told = answers(model, trained, other)
    train(engine, model, trained, "text", range(1, 2), None)
    engine.detach()
    engine.close()
    return told, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def answers(model: nn.Module, trained: optim.Optimizer, other: optim.Optimizer) -> Any:
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert not problems_of_cuts([trained], names, degree=2)
    [problem] = problems_of_cuts([trained, other], names, degree=2)
    return problem, [kept_per_element(trained, parameter) for parameter in names]


@pytest.mark.parametrize("pp", [1, 2])
def test_parameters_can_be_asked_about_wherever_their_values_are(pp):
    ranks = run_ranks(run, 2 * pp, pp, True)
    text, kept = ranks[0][0]
    assert "Lamb cannot update pieces of `" in text
    assert all(each == {"step": False, "exp_avg": True, "exp_avg_sq": True} for each in kept)
    assert all(told == (text, kept) for told, _ in ranks)
    _, undisturbed = run_ranks(run, 2 * pp, pp, False)[0]
    assert all(torch.equal(ranks[0][1][name], tensor) for name, tensor in undisturbed.items())
