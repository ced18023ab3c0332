"""A script of Accelerate that catches an error in a backward or in an optimizer, and trains the same model again."""

import pytest
import torch
from accelerate_checks import fresh_accelerator
from hf_checks import VOCABULARY, alone, language_model, on_ranks
from test_pretrained_accelerate import tokens
from torch.autograd.function import once_differentiable
from transformers import AutoModelForCausalLM

from smp_strategy.engine.local_model import LocalModel
from smp_strategy.errors import SMPError

PP1 = {"pipeline_parallel_degree": 1}
LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 4},
    "sdp2": {**PP1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    "zero1": {**PP1, "shard_optimizer_state": True},
    "dp2": PP1,
    "tp2": {**PP1, "tensor_parallel_degree": 2},
}
SPREAD = {"delayed_parameter_initialization": True, "loss_in_model": False}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    language_model().save_pretrained(folder)
    return folder


class OnPurposeError(Exception):
    pass


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, activation):
        ctx.activation = activation
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        if ctx.activation.fails:
            raise KeyboardInterrupt
        return gradient, None


class Activation(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.fails = inner, False

    def forward(self, tensor):
        return FailsInBackward.apply(self.inner(tensor), self)


class SGD(torch.optim.SGD):
    """Fails when it has updated what it was given, or before it has."""

    fails = ""

    def step(self, closure=None):
        if self.fails != "before the update":
            super().step(closure)
        if self.fails:
            raise OnPurposeError


def script(weights, smp, where, ranks, frees):
    """Two rounds of three batches. One of the first round fails on ``ranks``: the last if the model is left then."""
    accelerator = fresh_accelerator(None if smp is None else {**smp, **SPREAD})
    model = AutoModelForCausalLM.from_pretrained(weights)
    model.transformer.h[1].mlp.act = activation = Activation(model.transformer.h[1].mlp.act)
    fails_here = smp is None or torch.distributed.get_rank() in ranks
    failures, optimizer, restored, restore = 0, None, [], LocalModel.restore
    LocalModel.restore = lambda self, to: restored.append(to) or restore(self, to)
    for phase in range(2):
        if optimizer is None:
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = accelerator.prepare(model.train(), optimizer)
        for number, batch in enumerate(tokens()):
            fails = fails_here and phase == 0 and number == (2 if frees else 1)
            try:
                optimizer.zero_grad()
                logits = model(input_ids=batch).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].flatten())
                activation.fails = fails and where == "in backward"
                accelerator.backward(loss)
                optimizer.optimizer.fails = where if fails else ""
                optimizer.step()
            except (OnPurposeError, KeyboardInterrupt):
                failures += 1
        activation.fails, optimizer.optimizer.fails = False, ""
        state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        if frees:
            optimizer = accelerator.free_memory(optimizer)[0]
    return failures, restored, state


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ("sdp2", "in backward"),
        ("sdp2", "after the update"),
        ("zero1", "after the update"),
        ("pp2", "before the update"),
    ],
)
def test_the_next_round_begins_with_a_whole_model(layout, where, weights):
    _, _, expected = alone(script, weights, None, where, [0], True)
    for failures, restored, state in on_ranks(script, 2, weights, LAYOUTS[layout], where, [0, 1], True):
        assert failures == 1
        assert restored == ["all"]
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-7 if layout == "pp2" else 0, msg=name)


@pytest.mark.parametrize("layout", ["sdp2", "zero1"])
def test_the_same_round_goes_on_with_equal_weights(layout, weights):
    _, _, expected = alone(script, weights, None, "after the update", [0], False)
    for failures, _, state in on_ranks(script, 2, weights, LAYOUTS[layout], "after the update", [0, 1], False):
        assert failures == 1
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0, msg=name)


def script_with_mixed_weights(*arguments):
    with pytest.raises(SMPError, match=r"An error has ended the last optimizer step on ranks \[1\] of 2, and the oth"):
        script(*arguments)


@pytest.mark.parametrize("layout", ["sdp2", "pp2"])
def test_weights_of_two_steps_are_refused(layout, weights):
    on_ranks(script_with_mixed_weights, 2, weights, LAYOUTS[layout], "before the update", [1], True)


def error_of_script(*arguments):
    with pytest.raises(SMPError) as caught:
        script(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "dp2", "tp2"])
def test_a_step_after_an_update_on_some_ranks_is_refused(layout, weights):
    for message in on_ranks(error_of_script, 2, weights, LAYOUTS[layout], "before the update", [1], False):
        assert "An error has ended the last optimizer step on ranks [1] of 2" in message
