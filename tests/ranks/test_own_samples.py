"""``prescaled_batch=False``: each rank of a tensor-parallel group reads samples of its own.

A step is that of one process which has the samples of all ranks, those of the first rank first.
"""

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks

from .test_tensor_parallel_engine import STEPS, Setting, Text, assert_close, batch_of, built, engine_for, one_process

OWN = ("prescaled_batch", False)
NUMBERS = {"equal": (2, 2, 2, 2), "uneven": (3, 1, 2, 4), "none on one": (4, 0, 3, 1)}


def samples_of(step: int, rank: int, number: int) -> dict[str, Tensor]:
    return {key: value[:number] for key, value in batch_of(step, rank).items()}


def joint(step: int, replica: int, tp: int, numbers: tuple[int, ...]) -> dict[str, Tensor]:
    found = [samples_of(step, replica * tp + rank, numbers[rank]) for rank in range(tp)]
    return {key: torch.cat([each[key] for each in found]) for key in ("tokens", "labels")}


def calmly_built() -> tuple[Text, torch.optim.Optimizer]:
    # Not a tiny eps: Adam would blow the rounding of another order of additions up where gradients are tiny.
    model, _ = built()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def run_training(setting: Setting, numbers: tuple[int, ...]):
    model, optimizer = calmly_built()
    engine = engine_for(setting, model, optimizer)
    losses, norms, sizes = [], [], []
    for step in range(STEPS):
        rank = engine.mesh.dp_rank * setting.tp + engine.mesh.tp_rank
        batch = samples_of(step, rank, numbers[engine.mesh.tp_rank])
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        norms.append(engine.clip_grad_norm_(list(model.parameters()), setting.max_norm or 1e9).item())
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
        sizes.append(sum(result.sizes))
    batch = samples_of(STEPS, engine.mesh.dp_rank * setting.tp + engine.mesh.tp_rank, numbers[engine.mesh.tp_rank])
    [evaluated] = engine.eval_step(model.loss, batch).outputs[:1]
    return engine.mesh.dp_rank, losses, norms, sizes, evaluated.item(), engine.full_state_dict()


SETTINGS = {
    "t2": Setting(2, options=(OWN,), max_norm=0.3),
    "t4": Setting(4, options=(OWN,)),
    "t2 pp2": Setting(2, pp=2, options=(OWN,), max_norm=0.3),
    "t2 dp2": Setting(2, dp=2, options=(OWN,), max_norm=0.3),
    "t2 sdp2": Setting(2, dp=2, options=(OWN, ("sharded_data_parallel_degree", 2)), max_norm=0.3),
    "t2 zero1": Setting(2, dp=2, options=(OWN, ("shard_optimizer_state", True)), max_norm=0.3),
    "t2 memory": Setting(2, options=(OWN, ("optimize", "memory"))),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_with_samples_of_their_own_train_as_one_process_with_all_of_them(name, numbers, monkeypatch):
    setting, numbers = SETTINGS[name], NUMBERS[numbers]
    ranks = run_ranks(run_training, setting.ranks, setting, numbers, timeout=60)
    monkeypatch.setitem(
        one_process.__globals__, "batch_of", lambda step, replica: joint(step, replica, setting.tp, numbers)
    )
    losses, norms, state, _ = one_process(setting, range(STEPS), calmly_built())
    for replica, of_rank, of_norms, sizes, _, _ in ranks:
        assert of_rank == pytest.approx([each[replica] for each in losses], rel=1e-5)
        assert of_norms == pytest.approx(norms, rel=1e-5)
        assert sizes == [sum(numbers[: setting.tp])] * STEPS
    assert_close(ranks[0][5], state)
    for replica in range(setting.dp):
        # The same bits on all ranks of a replica, in evaluation as well.
        assert len({(*each[1], each[4]) for each in ranks if each[0] == replica}) == 1
