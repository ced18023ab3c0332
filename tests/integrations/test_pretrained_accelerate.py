"""`from_pretrained` in scripts of Accelerate and of `transformers.Trainer` under delayed initialisation."""

import os

import pytest
import torch
from accelerate_checks import fresh_accelerator
from hf_checks import EXACT, LENGTH, VOCABULARY, alone, language_model, logged, on_ranks, text_trainer, weights_of
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.pretrained import deferring
from smp_strategy.model.deferred_tensor import DeferredTensor

DELAYED = {"delayed_parameter_initialization": True}
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
LAYOUTS = {
    "pp2": (2, PP2),
    "sdp2": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}),
    "tp2": (2, {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    language_model().save_pretrained(folder, max_shard_size="10KB")
    return folder


def only_at_first(restore):
    """An engine begins with a whole module, of which no rank has values; after that it is never whole again."""

    def restored(engine):
        assert engine._parts.local_model is None
        restore(engine)

    return restored


def tokens():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator) for _ in range(3)]


def script(weights, smp):
    """A script with an Accelerator: it loads a model, trains it twice and gets its weights."""
    accelerator = fresh_accelerator(None if smp is None else {**smp, **DELAYED})
    model = AutoModelForCausalLM.from_pretrained(weights)
    is_deferred = any(isinstance(each, DeferredTensor) for each in model.parameters())
    losses = []
    for rate in (0.1, 0.01):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        model, optimizer = accelerator.prepare(model.train(), optimizer)
        for batch in tokens():
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        state = accelerator.get_state_dict(model)
        optimizer = accelerator.free_memory(optimizer)
    return is_deferred, losses, state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_of_accelerate_loads_in_parts_and_trains_on(layout, weights, monkeypatch):
    monkeypatch.setattr(Engine, "restore_everywhere", only_at_first(Engine.restore_everywhere))
    is_deferred, losses, expected = alone(script, weights, None)
    assert not is_deferred
    size, options = LAYOUTS[layout]
    for number, (is_deferred, found, state) in enumerate(on_ranks(script, size, weights, options)):
        assert is_deferred
        assert found == pytest.approx(losses, rel=1e-5)
        if number == 0:
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)


def adapted(model):
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def train(folder, weights, smp, adapt):
    """As users do: arguments first, then the model, then the Trainer."""
    options = {**EXACT, "optim": "sgd", "max_steps": 2}
    if smp is None:
        return trained(text_trainer(folder, model=adapt(AutoModelForCausalLM.from_pretrained(weights)), **options))
    from smp_strategy import SMPPlugin

    plugin = SMPPlugin(**smp, **DELAYED)
    model = adapt(AutoModelForCausalLM.from_pretrained(weights))
    assert any(isinstance(each, DeferredTensor) for each in model.parameters())
    return trained(text_trainer(folder, model=model, parallelism_config=plugin, **options))


def trained(trainer):
    trainer.train()
    first = logged(trainer)
    trainer.train()
    return [*first, *logged(trainer)], weights_of(trainer)


@pytest.mark.parametrize("adapt", [lambda model: model, adapted], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainer_loads_in_parts_and_trains_on(layout, adapt, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "restore_everywhere", only_at_first(Engine.restore_everywhere))
    losses, expected = alone(train, tmp_path / "plain", weights, None, adapt)
    size, options = LAYOUTS[layout]
    found, state = on_ranks(train, size, tmp_path / "smp", weights, options, adapt)[0]
    if layout != "sdp2":  # two replicas take half as many steps
        assert found == pytest.approx(losses, rel=1e-4)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert state.keys() == expected.keys()


def launched(weights):
    """A process of ``accelerate launch``: the options are in the environment before there is an Accelerator."""
    os.environ.update(ACCELERATE_USE_SMP="true", SMP_DELAYED_PARAMETER_INITIALIZATION="true")
    model = AutoModelForCausalLM.from_pretrained(weights)
    os.environ["SMP_DELAYED_PARAMETER_INITIALIZATION"] = "false"
    plain = AutoModelForCausalLM.from_pretrained(weights)
    return [{type(each) for each in net.parameters()} for net in (model, plain)]


def test_options_of_a_launch_hold_before_there_is_an_accelerator(weights):
    assert alone(launched, weights) == [{DeferredTensor}, {torch.nn.Parameter}]


def test_a_place_of_its_own_is_refused(weights):
    with deferring(), pytest.raises(Exception, match=r"`from_pretrained\(device_map='cpu'\)` under `delayed_param"):
        AutoModelForCausalLM.from_pretrained(weights, device_map="cpu")
