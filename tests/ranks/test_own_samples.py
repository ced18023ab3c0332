"""``prescaled_batch=False``: each rank of a tensor-parallel group reads samples of its own.

A step is that of one process which has the samples of all ranks, those of the first rank first.
"""

import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.tensor_parallel.joint_batch import join
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
    return engine.mesh.dp_rank, losses, norms, sizes, evaluated.item(), engine.saved.full_state_dict()


SETTINGS = {
    "t2": Setting(2, options=(OWN,), max_norm=0.3),
    "t4": Setting(4, options=(OWN,)),
    "t2 pp2": Setting(2, pp=2, options=(OWN,), max_norm=0.3),
    "t2 dp2": Setting(2, dp=2, options=(OWN,), max_norm=0.3),
    "t2 sdp2": Setting(2, dp=2, options=(OWN, ("sharded_data_parallel_degree", 2)), max_norm=0.3),
    "t2 zero1": Setting(2, dp=2, options=(OWN, ("shard_optimizer_state", True)), max_norm=0.3),
    "t2 memory": Setting(2, options=(OWN, ("optimize", "memory"))),
}


@pytest.mark.dear
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_with_samples_of_their_own_train_as_one_process_with_all_of_them(name, numbers, monkeypatch):
    setting, numbers = SETTINGS[name], NUMBERS[numbers]
    ranks = run_ranks(run_training, setting.ranks, setting, numbers)
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


@dataclasses.dataclass
class Sample:
    image: Tensor
    caption: list[str]


class Odd:
    def __init__(self, number: int) -> None:
        self.number = number


def ones(*size: int, **options: Any) -> Tensor:
    return torch.ones(size, **options)


# What rank 0 and rank 1 have read, and what a step gets on both.
JOINED: dict[str, tuple[Any, Any, Any]] = {
    "tensors": ([ones(2, 3), torch.arange(2)], [ones(1, 3), torch.arange(1)], [ones(3, 3), torch.tensor([0, 1, 0])]),
    "bools of a view": (ones(3, 2).bool().t(), ones(3, 4).bool().t(), ones(6, 3).bool()),
    "texts": ({"x": ones(1), "id": ["a"]}, {"x": ones(2), "id": ["b", "c"]}, {"x": ones(3), "id": ["a", "b", "c"]}),
    "boxes": (
        {"x": ones(1), "boxes": [{"at": ones(4, 2)}]},
        {"x": ones(1), "boxes": [{"at": ones(1, 2)}]},
        {"x": ones(2), "boxes": [{"at": ones(4, 2)}, {"at": ones(1, 2)}]},
    ),
    "tuples of texts": ((ones(1), ("a",)), (ones(2), ("b", "c")), (ones(3), ("a", "b", "c"))),
    "masks": (
        {"x": ones(2), "masks": [ones(2, 2), ones(3, 2)]},
        {"x": ones(1), "masks": [ones(4, 2)]},
        {"x": ones(3), "masks": [ones(2, 2), ones(3, 2), ones(4, 2)]},
    ),
    "arrays": (
        {"x": ones(2), "y": np.arange(2)},
        {"x": ones(1), "y": np.arange(1)},
        {"x": ones(3), "y": np.array([0, 1, 0])},
    ),
    "what broadcasts": ((ones(2, 3), ones(1, 3)), (ones(3, 3), ones(1, 3)), (ones(5, 3), ones(1, 3))),
    "dataclass": (Sample(ones(1), ["a"]), Sample(ones(1), ["b"]), Sample(ones(2), ["a", "b"])),
    "mapping": (UserDict(x=ones(2)), UserDict(x=ones(1)), UserDict(x=ones(3))),
    "beside samples": (
        (ones(2), torch.tensor(3), 4, None),
        (ones(1), torch.tensor(3), 4, None),
        (ones(3), torch.tensor(3), 4, None),
    ),
    "nothing but what is alike": ({"task": "cola"}, {"task": "cola"}, {"task": "cola"}),
    "no samples": (ones(0, 2), ones(1, 2), ones(1, 2)),
}
APART: dict[str, tuple[Any, Any, str]] = {
    "lengths": (ones(2, 3), ones(2, 4), r"samples of shape \[3\] where rank 1 has .* shape \[4\].*pad sequences"),
    "dtypes": (ones(2), ones(2).double(), r"torch.float32 .* where rank 1 has a tensor of torch.float64"),
    "structure": ({"x": ones(1)}, {"x": ones(1), "y": ones(1)}, r"hold different things \(1 and 2\)"),
    "numbers": ((ones(1), 3), (ones(1), 4), "a value of type int differs between ranks 0 and 1"),
    "numbers in tensors": ((ones(1), torch.tensor(3)), (ones(1), torch.tensor(4)), "torch.int64 differs between ranks"),
    "objects": ((ones(1), Odd(1)), (ones(1), Odd(2)), "of type Odd differs between ranks"),
    "objects that nobody can send": ((ones(1), lambda: 1), (ones(1), 1), "other ranks cannot be told of"),
    "not per sample": (
        (ones(2), ones(3)),
        (ones(2), ones(3)),
        r"2 samples \(`batch\[0\]`\), but `batch\[1\]` has 3, a different number of samples.*buffer",
    ),
    "gradients": (ones(2, requires_grad=True), ones(2), "rank 0 cannot: it holds a tensor that requires a gradient"),
    "samples on one": ({"x": ones(1)}, {"x": torch.tensor(1.0)}, "different things"),
}


def run_join(of_ranks: tuple[Any, Any]) -> Any:
    batch = of_ranks[dist.get_rank()]
    try:
        return join(batch, TensorGroup(dist.group.WORLD))[0]
    except UnsupportedError as error:
        return str(error)


def run_all_joins() -> tuple[dict[str, Any], dict[str, Any]]:
    return tuple({name: run_join(case[:2]) for name, case in cases.items()} for cases in (JOINED, APART))


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(run_all_joins, 2)


@pytest.mark.parametrize("name", JOINED)
def test_what_ranks_have_read_becomes_one_batch(name, of_ranks):
    for joined, _ in of_ranks:
        assert repr(joined[name]) == repr(JOINED[name][2])


@pytest.mark.parametrize("name", APART)
def test_what_does_not_go_together_is_the_same_error_on_all_ranks(name, of_ranks):
    messages = [apart[name] for _, apart in of_ranks]
    assert messages[0] == messages[1]
    with pytest.raises(UnsupportedError, match=APART[name][2]):
        raise UnsupportedError(messages[0])
    assert "prescaled_batch=True" in messages[0]
