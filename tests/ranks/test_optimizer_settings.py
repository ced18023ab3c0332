"""Settings of optimizers that ranks have set apart are refused: on all ranks, before the next update or save."""

import numpy as np
import pytest
import torch
from torch.optim import SGD

from smp_strategy.errors import SMPError
from smp_strategy.testing import run_ranks
from tests.ranks.test_tensor_parallel_engine import Setting, Text, engine_for, train

SHARDED = ("sharded_data_parallel_degree", 2)
LAYOUTS = {
    "pp2": Setting(1, pp=2),
    "dp2": Setting(1, dp=2),
    "sdp2": Setting(1, dp=2, options=(SHARDED,)),
    "t2": Setting(2),
    "pp2 sdp2": Setting(1, pp=2, dp=2, options=(SHARDED,)),
}


def built():
    torch.manual_seed(0)
    model = Text()
    blocks = list(model.blocks.parameters())
    others = [each for each in model.parameters() if all(each is not known for known in blocks)]
    rate = torch.tensor(0.1)  # some schedulers fill tensors
    return model, SGD([{"params": others}, {"params": blocks, "lr": rate, "betas": (0.5, 0.5)}], 0.1, momentum=0.5)


def error_after(setting, name, values, following):
    """Error of an action that follows an update before which each rank has set ``name`` to one of ``values``."""
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    train(engine, model, optimizer, range(1), None)
    value = values[engine.mesh.rank % 2]
    if isinstance(value, torch.Tensor):
        optimizer.param_groups[1][name].copy_(value)
    else:
        optimizer.param_groups[1][name] = value
    train(engine, model, optimizer, range(1), None)
    actions = {
        "step": lambda: train(engine, model, optimizer, range(1), None),
        "update": lambda: engine.begin_update(optimizer),
        "save": engine.saved.full_state_dict,
        "save of shares": lambda: engine.saved.held_state([optimizer]),
        "end": engine.detach,
    }
    try:
        actions[following]()
    except SMPError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_learning_rates_on_some_ranks_are_refused_by_the_next_step(layout):
    setting = LAYOUTS[layout]
    values = torch.tensor(0.1), torch.tensor(0.05)
    for error in run_ranks(error_after, setting.ranks, setting, "lr", values, "step"):
        assert "`lr` of parameter group 1 is 0.10000000149011612 on rank 0, 0.05000000074505806 on rank 1" in error
        assert "average the value over all ranks before (`self.log(..., sync_dist=True)`, or `accelerator.re" in error


@pytest.mark.parametrize(("kind", "shown"), [(np.float64, "1.0"), (np.float32, "1.0"), (bool, "True")])
def test_settings_of_all_kinds_are_compared(kind, shown):
    for error in run_ranks(error_after, 2, LAYOUTS["dp2"], "momentum", (kind(1), kind(0)), "step"):
        assert f"`momentum` of parameter group 1 is {shown} on rank 0" in error


@pytest.mark.parametrize("following", ["update", "save", "save of shares", "end"])
def test_whatever_follows_refuses_them(following):
    for error in run_ranks(error_after, 2, LAYOUTS["sdp2"], "betas", ((0.5, 0.9), (0.5, 0.8)), following):
        assert "`betas` of parameter group 1 is (0.5, 0.9) on rank 0, (0.5, 0.8) on rank 1" in error


@pytest.mark.parametrize("value", [0.05, torch.tensor(0.05)], ids=str)
def test_what_all_ranks_set_alike_is_no_error(value):
    assert run_ranks(error_after, 2, LAYOUTS["pp2"], "lr", (value, value), "step") == ["", ""]
