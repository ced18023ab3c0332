"""Models of Hugging Face, split by their own plans, through the engine; random numbers; orders of collectives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import VOCABULARY, WithOwnLoss, gpt2
from tests.ranks.test_tensor_parallel_engine import TOLERANCE, Setting, Text, engine_for, train
from tests.ranks.test_tensor_parallel_engine import one_process as plain

STEPS = 2


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY + 1,  # uneven parts
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return WithOwnLoss(LlamaForCausalLM(config))


MODELS = {"gpt2": gpt2, "gpt2 tied": lambda: gpt2(tied=True), "llama": llama}


def tokens(step: int, replica: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    ids = torch.randint(VOCABULARY, (4, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def built(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def run_model(name: str, setting: Setting) -> Any:
    model, optimizer = built(name)
    reports: list[str] = []
    engine = Engine(
        SMPConfig(
            pipeline_parallel_degree=setting.pp,
            tensor_parallel_degree=setting.tp,
            microbatches=setting.microbatches,
            evaluation_microbatches=setting.microbatches,
            smp_report="full",
            **dict(setting.options),
        ),
        report=reports.append,
    )
    engine.attach(model, [optimizer])
    losses = []
    for step in range(STEPS):
        batch = tokens(step, engine.mesh.dp_rank)
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.clip_grad_norm_(list(model.parameters()), 1.0)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
    model.eval()
    with torch.no_grad():
        losses += [loss.item() for loss in engine.eval_step(model.loss, tokens(9, 0)).outputs]
    return losses, engine.saved.full_state_dict(), "\n".join(reports)


def one_process(name: str, setting: Setting) -> Any:
    model, optimizer = built(name)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(setting.dp):
            batch = tokens(step, replica)
            for start in (0, 2):
                part = {key: value[start : start + 2] for key, value in batch.items()}
                (model.loss(part) / (2 * setting.dp)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        batch = tokens(9, 0)
        parts = [{key: value[start : start + 2] for key, value in batch.items()} for start in (0, 2)]
        return [model.loss(part).item() for part in parts], model.state_dict()


SETTINGS = {
    "t2": Setting(2),
    "t2 pp2": Setting(2, pp=2),
    "t2 sdp2": Setting(2, dp=2, options=(("sharded_data_parallel_degree", 2),)),
    "t2 sequence": Setting(2, options=(("optimize", "memory"),)),
    "t2 pp2 sequence": Setting(2, pp=2, options=(("optimize", "memory"),)),
    "t2 sdp2 sequence": Setting(2, dp=2, options=(("sharded_data_parallel_degree", 2), ("optimize", "memory"))),
    "t2 zero1": Setting(2, dp=2, options=(("shard_optimizer_state", True),)),
}


@pytest.mark.dear
@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_hugging_face_trains_as_in_one_process(name, layout):
    setting = SETTINGS[layout]
    ranks = run_ranks(run_model, setting.ranks, name, setting)
    evaluated, state = one_process(name, setting)
    for losses, _, report in ranks:
        assert losses[STEPS:] == pytest.approx(evaluated, rel=1e-5)
        assert "layers are split over 2 ranks" in report
    assert list(ranks[0][1]) == list(state)
    for key, value in state.items():
        torch.testing.assert_close(ranks[0][1][key], value, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


class Wandering(Text):
    """Which blocks are used, and in which order, depends on the samples: stages leave their plans."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.paths: list[tuple[int, ...]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["tokens"])
        path = []
        for turn in range(4):
            number = int(hidden.detach().sum().abs() * 100 + turn) % 4
            hidden = self.blocks[number](hidden)
            path.append(number)
        self.paths.append(tuple(path))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


def run_wandering(setting: Setting, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = Wandering(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_for(setting, model, optimizer)
    losses, _ = train(engine, model, optimizer, range(4), None)
    return losses, engine.saved.full_state_dict(), set(model.paths)


@pytest.mark.dear
@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_that_have_parts_keep_one_order_also_off_the_timetable(pp):
    """They improvise together: otherwise their sums would be those of different microbatches."""
    setting = Setting(2, pp=pp, microbatches=4)
    ranks = run_ranks(run_wandering, setting.ranks, setting)
    torch.manual_seed(0)
    model = Wandering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, _, state, _ = plain(setting, range(4), (model, optimizer))
    assert len(set(model.paths)) > 4
    for losses, *_ in ranks:
        assert losses == pytest.approx([total for [total] in expected], rel=1e-5)
    torch.testing.assert_close(ranks[0][1], state, **TOLERANCE)


class Dropping(Text):
    """Drops in the middle of split regions and outside of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        for block in self.blocks:
            block.mlp[1] = nn.Sequential(nn.GELU(), nn.Dropout(0.3))


def run_dropping(setting: Setting) -> Any:
    torch.manual_seed(0)
    model = Dropping(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_for(setting, model, optimizer)
    losses, norms = train(engine, model, optimizer, range(4), None)
    whole = {name: value.clone() for name, value in engine.saved.full_state_dict().items()}
    engine.detach()
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    return losses, norms, whole, kept


@pytest.mark.dear
def test_random_numbers_are_the_same_for_whole_activations_and_for_any_number_of_stages():
    one, two = (run_ranks(run_dropping, 2 * pp, Setting(2, pp=pp)) for pp in (1, 2))
    for losses, norms, _, kept in (*one, *two):
        assert (losses, norms) == one[0][:2]
        # What ranks have whole has stayed the same on all of them.
        assert all(torch.equal(value, one[0][3][name]) for name, value in kept.items())
    assert all(torch.equal(value, two[0][2][name]) for name, value in one[0][2].items())
    torch.manual_seed(0)
    model = Dropping(0.3)
    plain_losses, *_ = plain(Setting(2), range(4), (model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert one[0][0] != pytest.approx([total for [total] in plain_losses], rel=1e-5)


def run_returning_logits(pp: int) -> Any:
    """What a step returns is looked at on the first rank alone."""
    model, _ = built("llama")
    options = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": 2}
    engine = Engine(SMPConfig(**options, microbatches=2, evaluation_microbatches=2))
    engine.attach(model)

    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = model.model(**batch)
        return {"loss": found.loss, "logits": found.logits}

    trained = engine.train_step(step, tokens(0, 0), loss_of=lambda found: found["loss"]).outputs
    evaluated = engine.eval_step(step, tokens(0, 0)).outputs
    if engine.mesh.rank != 0:
        return None
    return [found["logits"].detach().clone() for found in (*trained, *evaluated)]


@pytest.mark.parametrize("pp", [1, 2])
def test_logits_that_a_step_returns_are_whole_for_a_callback_on_one_rank(pp):
    found = run_ranks(run_returning_logits, 2 * pp, pp)[0]
    model, _ = built("llama")
    batch = tokens(0, 0)
    expected = [model.model(batch["input_ids"][start : start + 2]).logits.detach() for start in (0, 2)]
    for logits, wanted in zip(found, [*expected, *expected], strict=True):
        assert type(logits) is Tensor
        torch.testing.assert_close(logits, wanted, **TOLERANCE)


def run_told_at_different_times(pp: int) -> Any:
    """Some ranks learn early that all stages have run the same programs, others only when they ask for it."""
    Ledger.is_alike = lambda ledger: dist.get_rank() % 2 == 0
    return run_returning_logits(pp)


@pytest.mark.dear
def test_ranks_that_have_parts_put_results_together_at_the_same_time():
    """Messages from other stages come when they come, and sums of parts must not wait for a result's parts."""
    run_ranks(run_told_at_different_times, 4, 2)
