"""Models of Hugging Face, split by their own plans, through the engine; random numbers; orders of collectives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import VOCABULARY, WithOwnLoss, gpt2
from tests.ranks.test_tensor_parallel_engine import TOLERANCE, Setting

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
    return losses, engine.full_state_dict(), "\n".join(reports)


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
    "t2 zero1": Setting(2, dp=2, options=(("shard_optimizer_state", True),)),
}


@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_hugging_face_trains_as_in_one_process(name, layout):
    setting = SETTINGS[layout]
    ranks = run_ranks(run_model, setting.ranks, name, setting, timeout=90)
    evaluated, state = one_process(name, setting)
    for losses, _, report in ranks:
        assert losses[STEPS:] == pytest.approx(evaluated, rel=1e-5)
        assert "layers are split over 2 ranks" in report
    assert list(ranks[0][1]) == list(state)
    for key, value in state.items():
        torch.testing.assert_close(ranks[0][1][key], value, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")
