"""Remedies in errors name the calls of the door that the user came through."""

import pytest
import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.door_words import speak
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import SMPError
from smp_strategy.integrations.accelerate.session import WORDS as OF_ACCELERATE
from smp_strategy.integrations.lightning.joining import WORDS as OF_LIGHTNING
from smp_strategy.testing import run_ranks

FOREIGN = {"accelerate": ("Lightning", "trainer.", "self.log", "gradient_clip_val"), "lightning": ("accelerator.",)}
LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2},
    "sdp2": {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2},
}


def refusals(door, layout):
    """What is said of a weight that is not here, of the state of an optimizer, and of steps that part."""
    speak({"accelerate": OF_ACCELERATE, "lightning": OF_LIGHTNING}[door])
    module = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(SMPConfig(microbatches=2, **LAYOUTS[layout]), report=lambda text: None)
    engine.attach(module, [optimizer])
    result = engine.train_step(lambda x: module(x).square().mean(), torch.randn(8, 4), loss_of=lambda loss: loss)
    found = []
    for look in (lambda: [each.sum().item() for each in module.parameters()], lambda: module.state_dict()):
        try:
            look()
        except SMPError as error:
            found.append(str(error))
    result.commit(torch.ones(()), reduce=True)
    try:
        [each.grad.norm().item() for each in module.parameters() if each.grad is not None]
    except SMPError as error:
        found.append(str(error))
    engine.detach()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("door", FOREIGN)
def test_a_remedy_is_a_call_of_the_door(door, layout):
    for found in run_ranks(refusals, 2, door, layout):
        assert found
        for text in found:
            assert not [word for word in FOREIGN[door] if word in text], text
