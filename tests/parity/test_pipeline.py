"""Every pipeline layout gives the weights of one process that accumulates over the same microbatches."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

from .models import MODELS, Forked, Text, batch_for, gpt2

STEPS = 5


def one_process(name: str, microbatches: int, samples: int, replicas: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """Train in this process, microbatch by microbatch; with replicas, average their gradients."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(replicas):
            cut, sizes = split(batch_for(name, step * replicas + replica, samples), microbatches)
            for part, size in zip(cut, sizes, strict=True):
                loss = model.loss(part) * (size / sum(sizes))
                loss.backward()
                total += loss.item() / replicas
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= replicas
        optimizer.step()
        losses.append(total)
    return model.state_dict(), losses


def run_pipeline(name: str, options: dict, samples: int) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(dist.get_rank())  # rank 0's initial values count
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    losses = []
    for step in range(STEPS):
        batch = batch_for(name, step * engine.mesh.dp + engine.mesh.dp_rank, samples)
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        optimizer.step()
        losses.append(result.loss.item())
    return engine.saved.full_state_dict(), losses


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        if tolerance:
            torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(found[name], tensor), name


# Where several stages add to the same gradient over several microbatches, the order of additions differs.
TOLERANCE = {"text, tied": 1e-6, "gpt2, tied": 1e-6, "skips": 1e-6}
# Where units and glue use the same weight, the glue's part of its gradient is added last, on any number of stages.
TOLERANCE_ALWAYS = {"weights in the glue": 1e-6}


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_one_process(name, pp):
    expected, expected_losses = one_process(name, 4, samples=8)
    options = {"pipeline_parallel_degree": pp, "microbatches": 4}
    results = run_ranks(run_pipeline, pp, name, options, 8)
    tolerance = TOLERANCE_ALWAYS.get(name, TOLERANCE.get(name, 0.0) if pp > 1 else 0.0)
    assert_same(expected, results[0][0], tolerance)
    for _, losses in results:
        assert losses == pytest.approx(expected_losses, rel=1e-6)


@pytest.mark.parametrize("name", ["text, tied", "gpt2, tied", "skips"])
def test_weights_tied_across_stages_are_bit_identical_at_one_microbatch(name):
    expected, _ = one_process(name, 1, samples=8)
    results = run_ranks(run_pipeline, 2, name, {"pipeline_parallel_degree": 2, "microbatches": 1}, 8)
    assert_same(expected, results[0][0])


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": "simple"},
        {"active_microbatches": 1},
        {"placement_strategy": "spread"},
        {"skip_tracing": True},
        {"memory_weight": 0.0},
    ],
    ids=lambda options: "=".join(map(str, *options.items())),
)
def test_no_option_changes_the_numbers(options):
    expected, _ = one_process("text", 4, samples=8)
    options = {"pipeline_parallel_degree": 2, "microbatches": 4, **options}
    assert_same(expected, run_ranks(run_pipeline, 2, "text", options, 8)[0][0])


@pytest.mark.filterwarnings("ignore:`microbatches` is [48], but the batch has too few samples:UserWarning")
@pytest.mark.parametrize(("samples", "microbatches"), [(10, 4), (3, 8), (1, 4)])
def test_uneven_and_small_batches_are_weighted_by_samples(samples, microbatches):
    expected, _ = one_process("text", microbatches, samples)
    options = {"pipeline_parallel_degree": 2, "microbatches": microbatches}
    assert_same(expected, run_ranks(run_pipeline, 2, "text", options, samples)[0][0])


@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_replicas_average_their_gradients(placement):
    expected, _ = one_process("text", 2, samples=8, replicas=2)
    options = {"pipeline_parallel_degree": 2, "microbatches": 2, "placement_strategy": placement}
    results = run_ranks(run_pipeline, 4, "text", options, 8)
    assert_same(expected, results[0][0], 1e-6)


def run_dropout(pp: int, policy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Text(dropout=0.5)
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=4, pipeline=policy))
    engine.attach(model)
    batch = batch_for("text", 0, 8)
    engine.train_step(model.loss, batch, loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_dropout_masks_depend_on_no_layout_and_differ_between_units():
    (alone,) = run_ranks(run_dropout, 1, 1, "interleaved")
    for pp, policy in [(2, "interleaved"), (2, "simple"), (4, "interleaved")]:
        merged: dict[str, Tensor] = {}
        for gradients in run_ranks(run_dropout, pp, pp, policy):
            merged.update(gradients)
        for name, gradient in alone.items():
            assert torch.equal(gradient, merged[name]), (pp, policy, name)


def run_bytes(pp: int) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=2))
    engine.attach(model, [optimizer])
    result = engine.train_step(model.loss, batch_for("gpt2", 0, 4), loss_of=lambda loss: loss)
    result.commit(torch.ones(()), reduce=True)
    optimizer.step()
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = sum(state["exp_avg"].nbytes for state in optimizer.state.values())
    return sum(storages.values()), gradients, moments


def test_each_rank_holds_only_its_own_share_of_weights_gradients_and_optimizer_state():
    total = sum(p.nbytes for p in gpt2().parameters())
    num_parameters = sum(1 for _ in gpt2().parameters())
    for weights, gradients, moments in run_ranks(run_bytes, 4, 4):
        own = weights - 4 * num_parameters  # at most one placeholder element per parameter
        assert own <= gradients == moments <= weights
        assert 0.15 * total < gradients < 0.40 * total


def run_forked(pp: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Forked()
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=2))
    engine.attach(model)
    engine.train_step(model.loss, batch_for("text", 0, 4), loss_of=lambda loss: loss).commit(
        torch.ones(()), reduce=True
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_frozen_parts_and_parts_without_gradient_get_none():
    (alone,) = run_ranks(run_forked, 1, 1)
    assert not any(name.startswith("left") for name in alone)
    merged: dict[str, Tensor] = {}
    for gradients in run_ranks(run_forked, 2, 2):
        merged.update(gradients)
    assert alone.keys() == merged.keys()
    assert all(torch.equal(alone[name], merged[name]) for name in alone)
