"""Which units are computed again, after options and notes."""

import copy

import pytest
from torch import nn

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.selection import choose, set_activation_checkpointing
from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.model.units import choose_units
from tests.unit.activations.calls import ALL, Mlp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(Mlp(), nn.Tanh(), Mlp()) for _ in range(3))
        self.head = nn.Linear(4, 4)


def chosen(model: nn.Module, **options: object) -> object:
    return choose(SMPConfig(**options), model, choose_units(model, 2, ("Sequential",)))


def test_nothing_is_computed_again_unless_it_is_asked_for() -> None:
    assert chosen(Model()) == ({}, {})


def test_all_means_every_unit() -> None:
    units, inside = chosen(Model(), activation_checkpointing="all")
    assert (list(units), inside) == (["embed", "blocks.0", "blocks.1", "blocks.2", "head"], {})
    assert set(units.values()) == {ALL}


@pytest.mark.parametrize(
    ("patterns", "units", "inside"),
    [
        ("blocks.1", ["blocks.1"], []),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"], []),
        ("blocks", ["blocks.0", "blocks.1", "blocks.2"], []),
        ("head, blocks.[02]", ["blocks.0", "blocks.2", "head"], []),
        (["Linear"], ["head"], [f"blocks.{n}.{k}.{part}" for n in range(3) for k in (0, 2) for part in ("up", "down")]),
        (["Mlp", "head"], ["head"], [f"blocks.{n}.{k}" for n in range(3) for k in (0, 2)]),
        (
            ["tests.unit.activations.calls.Mlp", "blocks.0"],
            ["blocks.0"],
            ["blocks.1.0", "blocks.1.2", "blocks.2.0", "blocks.2.2"],
        ),
    ],
)
def test_patterns_are_names_or_classes_and_the_outermost_counts(patterns, units, inside) -> None:
    found = chosen(Model(), activation_checkpointing=patterns)
    assert (sorted(found.units), sorted(found.inside)) == (sorted(units), sorted(inside))


def test_options_say_how() -> None:
    units, _ = chosen(
        Model(),
        activation_checkpointing="head",
        checkpoint_strategy="group_3",
        selective_checkpointing=True,
        preserve_rng_state=False,
    )
    assert units == {"head": ActivationPolicy(recompute="cheap", group=3, preserve_rng_state=False)}


def test_a_pattern_that_fits_nothing_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="names 'blocs', but the model has no module .* Did you mean 'blocks'?"):
        chosen(Model(), activation_checkpointing="blocs")


def test_what_is_asked_for_by_hand_comes_before_options_and_copies_keep_it() -> None:
    model = Model()
    set_activation_checkpointing(model.blocks, strategy="contiguous")
    set_activation_checkpointing(model.blocks[1], preserve_rng_state=False)
    units, inside = chosen(copy.deepcopy(model), activation_checkpointing="all")
    assert units["head"] == ALL
    assert units["blocks.0"] == units["blocks.2"] == ActivationPolicy(recompute="all", group=None)
    assert units["blocks.1"] == ActivationPolicy(recompute="all", preserve_rng_state=False)
    assert not inside


def test_a_sequential_inside_of_a_unit_stands_for_its_layers() -> None:
    model = Model()
    model.head = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    set_activation_checkpointing(model.head[1], strategy="group_2")
    assert chosen(model).inside == dict.fromkeys(["head.1.0", "head.1.1"], ActivationPolicy(recompute="all", group=2))


def test_a_strategy_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match="each, contiguous or group_N with N from 1 on, but is 'group_0'"):
        set_activation_checkpointing(nn.Linear(1, 1), strategy="group_0")
    with pytest.raises(ConfigError, match="`checkpoint_strategy` must be .* but is 'all'"):
        SMPConfig(activation_checkpointing="all", checkpoint_strategy="all")


@pytest.mark.parametrize("option", [{"checkpoint_strategy": "group_2"}, {"preserve_rng_state": False}])
def test_options_without_effect_are_errors(option) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(option))}=.*` has no effect, because nothing is computed"):
        SMPConfig(**option)


def test_selective_without_anything_to_select_from_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`selective_checkpointing` has no effect"):
        chosen(Model(), selective_checkpointing=True)
    model = Model()
    set_activation_checkpointing(model.head)
    assert chosen(model, selective_checkpointing=True).units["head"].recompute == "cheap"


def test_everything_that_units_keep_is_offloaded_where_none_is_computed_again() -> None:
    units, inside = chosen(Model(), offload_activations=True)
    assert units == dict.fromkeys(["embed", "blocks.0", "blocks.1", "blocks.2", "head"], ActivationPolicy(offload=True))
    units, inside = chosen(Model(), offload_activations=True, activation_checkpointing="Mlp")
    assert set(units.values()) == {ActivationPolicy(offload=True)}
    assert inside


def test_of_units_that_are_computed_again_the_inputs_are_offloaded_and_of_others_nothing() -> None:
    units, _ = chosen(Model(), offload_activations=True, activation_checkpointing="blocks.1")
    assert units == {"blocks.1": ActivationPolicy(recompute="all", offload=True)}


@pytest.mark.parametrize("option", [{"offload_min_bytes": "2MiB"}, {"activation_loading_horizon": 3}])
def test_options_of_offload_without_offload_are_errors(option) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(option))}=.*` has no effect, because nothing is offloaded"):
        SMPConfig(**option)
    SMPConfig(**option, offload_activations=True)


@pytest.mark.parametrize("size", ["2 units", "many", -1])
def test_a_size_that_is_none_is_an_error(size) -> None:
    with pytest.raises(ConfigError, match="`offload_min_bytes`"):
        SMPConfig(offload_activations=True, offload_min_bytes=size)
    assert SMPConfig(offload_activations=True, offload_min_bytes="2KiB").least_offloaded == 2048
