"""How tensors without memory get values from initialisers and state dicts, part by part, and what is refused."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.units import choose_units

CPU = torch.device("cpu")


class Bare(nn.Module):
    """A parameter that nobody initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Resettable(Bare):
    """One that somebody does, with a given function."""

    fill: Callable[[Tensor], Any]

    def reset_parameters(self) -> None:
        type(self).fill(self.scale)


def resettable(fill: Callable[[Tensor], Any]) -> nn.Module:
    return type("Filled", (Resettable,), {"fill": staticmethod(fill)})()


class Container(nn.Module):
    """Scales the weights of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for first, second in self.layers:
                nn.init.trunc_normal_(first.weight)
                nn.init.orthogonal_(second.weight)
                second.weight.mul_(2.0)


class Language(nn.Module):
    """Applies an initialiser to all modules, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif module is self:
            self.table.copy_(torch.arange(4))


class ScaledInTheEnd(Language):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.block.weight, std=0.01)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def ready(model: nn.Module, *optimizers: torch.optim.Optimizer, seed: int = 1) -> DelayedModule:
    delayed = DelayedModule(model, seed, CPU)
    delayed.prepare(choose_units(model), optimizers)
    return delayed


def filled(make: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    model = built(make)
    ready(model, seed=seed).settle(lambda tensor: True)
    return model


def refusal(model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    with pytest.raises(UnsupportedError) as caught:
        ready(model, *optimizers).settle(lambda tensor: True)
    return str(caught.value)


MODELS = {
    "container": Container,
    "language": Language,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "recurrent": lambda: nn.Sequential(nn.LSTM(4, 4), nn.BatchNorm1d(4)),
    "whole transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_do_not_depend_on_the_order_or_on_what_is_filled_together(name):
    whole = filled(MODELS[name])
    backwards = built(MODELS[name])
    delayed = ready(backwards)
    for tensor in reversed([*backwards.parameters(), *backwards.buffers()]):
        delayed.materialise([tensor])
    assert not delayed.is_pending
    expected = whole.state_dict()
    for each, tensor in backwards.state_dict().items():
        assert torch.equal(tensor, expected[each]), each
        assert not tensor.is_meta


def test_values_depend_on_the_seed_and_differ_between_modules():
    model, other = filled(Container), filled(Container, seed=2)
    weights = [layer[0].weight for layer in (*model.layers, *other.layers)]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_initialisers_of_containers_reach_into_every_part():
    for _, second in filled(Container).layers:
        torch.testing.assert_close(second.weight @ second.weight.T, 4 * torch.eye(4), rtol=0, atol=1e-5)


def test_the_model_around_has_the_last_word():
    model = filled(Language)
    assert model.head.weight is model.embed.weight
    assert 0.005 < model.block.weight.std() < 0.05
    assert model.table.tolist() == [0, 1, 2, 3]


def test_random_streams_go_on_as_if_nothing_was_drawn():
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = draw()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    filled(Container)
    assert draw() == expected


def test_a_part_with_values_keeps_them():
    def make() -> nn.Module:
        model = Container()
        with torch.device("cpu"):
            model.layers[1] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return model

    model = built(make)
    before = [parameter.clone() for parameter in model.layers[1].parameters()]
    ready(model).settle(lambda tensor: True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.layers[1].parameters(), strict=True))


def test_what_others_hold_has_no_memory_and_its_layout():
    model = built(Language)
    delayed = ready(model)
    delayed.settle(lambda tensor: tensor is not model.embed.weight)
    assert model.embed.weight.device == CPU
    assert model.embed.weight.stride() == (4, 1)
    assert model.embed.weight.untyped_storage().nbytes() == 0


def test_what_is_filled_under_inference_can_be_trained():
    model = built(lambda: nn.Linear(2, 2))
    with torch.inference_mode():
        ready(model).settle(lambda tensor: True)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_values_win_and_need_no_initialiser(assign):
    model = built(lambda: nn.Sequential(nn.Linear(3, 3), Bare()))
    delayed = DelayedModule(model, 1, CPU)
    before = list(model.parameters())
    values = {"0.weight": torch.full((3, 3), 2.0), "1.scale": torch.full((3,), 3.0)}
    model.load_state_dict(values, strict=False, assign=assign)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    delayed.prepare(choose_units(model))
    delayed.settle(lambda tensor: True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    assert not model[0].bias.isnan().any()
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


def test_what_is_replaced_before_there_are_values_is_taken_as_it_is_then():
    model = built(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    delayed = DelayedModule(model, 1, CPU)
    model[0].running_mean = torch.full((3,), 5.0)
    model[1] = built(lambda: nn.Linear(3, 3))
    delayed.prepare(choose_units(model))
    delayed.settle(lambda tensor: True)
    assert model[0].running_mean.tolist() == [5.0] * 3
    assert not model[1].weight.isnan().any()


def test_a_state_dict_that_does_not_fit_is_an_error_as_ever():
    model = built(lambda: nn.Linear(3, 3))
    DelayedModule(model, 1, CPU)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(3)})


class Replacing(Bare):
    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.arange(3.0, device=self.scale.device))


def test_an_initialiser_may_replace_its_tensor():
    model = built(Replacing)
    before = model.scale
    ready(model).settle(lambda tensor: True)
    assert model.scale is before
    assert model.scale.tolist() == [0, 1, 2]


def test_what_nobody_initialises_is_refused_by_name():
    message = refusal(built(lambda: nn.Sequential(nn.Linear(3, 3), Bare())))
    assert "No initialiser gives values to `1.scale`. Define `reset_parameters()`" in message


def test_what_initialisers_fill_in_part_is_refused_by_name():
    message = refusal(built(lambda: nn.Sequential(resettable(lambda scale: nn.init.ones_(scale[:2])))))
    assert "Initialisers leave a part of `0.scale` without values" in message


def test_an_initialiser_that_looks_at_values_is_refused_by_name():
    message = refusal(built(lambda: nn.Sequential(resettable(lambda scale: scale.data.mul_(scale.max().item())))))
    assert "`Resettable.reset_parameters` cannot initialise `0`" in message


def test_what_a_constructor_does_beyond_its_initialisers_is_refused_by_name():
    assert "`block.weight` was changed on the meta device by more" in refusal(built(ScaledInTheEnd))


def test_what_a_hook_does_before_there_are_values_is_refused_by_name():
    model = built(lambda: nn.Sequential(nn.Linear(3, 3)))
    with torch.no_grad():
        model[0].bias.clamp_(min=0)
    assert "`0.bias` was changed on the meta device by more" in refusal(model)


def test_a_tensor_in_an_attribute_is_refused_by_name():
    model = built(lambda: nn.Linear(3, 3))
    model.total = torch.zeros(3, device="meta")
    assert "`total` is neither a parameter nor a buffer" in refusal(model)


def test_an_optimizer_with_state_for_parameters_without_values_is_refused_by_name():
    model = built(lambda: nn.Linear(3, 3))
    assert "The optimizer Adagrad makes state when it is built" in refusal(
        model, torch.optim.Adagrad(model.parameters())
    )


def test_adapters_are_not_initialised_by_the_model_around_them():
    class Adapted(nn.Module):
        adapter_layer_names = ("adapter",)

        def __init__(self) -> None:
            super().__init__()
            self.adapter, self.base_layer = nn.Linear(3, 3), nn.Linear(3, 3)

    message = refusal(built(lambda: nn.Sequential(Adapted())))
    assert "No initialiser gives values to `0.adapter.weight`, `0.adapter.bias`." in message


def test_saving_before_there_are_values_is_refused():
    delayed = ready(built(lambda: nn.Sequential(nn.Linear(3, 3))))
    with pytest.raises(UnsupportedError, match="to be saved before its first step"):
        delayed.refuse_saving()
    delayed.settle(lambda tensor: True)
    delayed.refuse_saving()
