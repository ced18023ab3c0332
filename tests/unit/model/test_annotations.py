"""Stages that modules are given by hand: which modules get which, and what is refused."""

import copy
import threading

import pytest
import torch
from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import partition, placed_modules, set_partition
from smp_strategy.model.units import choose_units, unit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 8)


def test_the_names_are_those_of_the_package():
    import smp_strategy.engine.engine  # a room of the name `partition` would take its place

    assert smp_strategy.set_partition is set_partition
    assert smp_strategy.partition is partition


# --- notes ----------------------------------------------------------------------------------------------------------


def test_a_module_is_placed_with_everything_in_it():
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    assert set_partition(model["a"], 1) is model["a"]
    assert placed_modules(model) == dict.fromkeys(["a", "a.norm", "a.mlp", "a.mlp.0", "a.mlp.1", "a.mlp.2"], 1)


def test_what_is_placed_later_wins():
    block = Block()
    set_partition(block.mlp, 2)
    set_partition(block, 0)
    set_partition(block.norm, 1)
    assert set(placed_modules(block).items()) >= {("", 0), ("mlp", 0), ("mlp.0", 0), ("norm", 1)}


def test_modules_that_are_created_inside_are_placed_wherever_they_are_registered_later():
    with partition(1):
        late = Block()
        layers = [nn.Linear(4, 4) for _ in range(2)]
    model = Model()
    model.late, model.layers = late, nn.ModuleList(layers)
    placed = placed_modules(model)
    assert {placed[name] for name in ("late", "late.mlp.0", "layers.0", "layers.1")} == {1}
    assert not any(name.startswith(("embed", "blocks", "head")) or name in ("", "layers") for name in placed)


def test_the_innermost_context_wins():
    with partition(0):
        before = nn.Linear(1, 1)
        with partition(2):
            inside = nn.Linear(1, 1)
        after = nn.Linear(1, 1)
    assert [placed_modules(module)[""] for module in (before, inside, after)] == [0, 2, 0]


def test_an_exception_leaves_the_context():
    with pytest.raises(KeyError), partition(3):
        raise KeyError
    assert placed_modules(nn.Linear(1, 1)) == {}


def test_a_context_may_be_a_decorator():
    @partition(1)
    def build() -> nn.Module:
        return nn.Linear(1, 1)

    assert placed_modules(build()) == {"": 1}
    assert placed_modules(nn.Linear(1, 1)) == {}


def test_another_thread_is_in_no_context():
    found = []
    with partition(1):
        thread = threading.Thread(target=lambda: found.append(placed_modules(nn.Linear(1, 1))))
        thread.start()
        thread.join()
    assert found == [{}]


def test_threads_may_leave_in_any_order():
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    found = {}

    def first():
        with partition(1):
            first_is_in.set()
            second_is_in.wait(10)
            found["first"] = placed_modules(nn.Linear(1, 1))
        first_is_out.set()

    def second():
        first_is_in.wait(10)
        with partition(2):
            second_is_in.set()
            first_is_out.wait(10)
            found["second"] = placed_modules(nn.Linear(1, 1))

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": {"": 1}, "second": {"": 2}}
    assert placed_modules(nn.Linear(1, 1)) == {}


def test_copies_keep_their_stage():
    with partition(1):
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert placed_modules(encoder)["layers.1.linear1"] == 1
    assert placed_modules(copy.deepcopy(layer))[""] == 1


def test_a_stage_does_not_change_what_a_module_saves():
    with partition(1):
        placed = Block()
    assert placed.state_dict().keys() == Block().state_dict().keys()
    assert [type(part) for part in placed.modules()] == [type(part) for part in Block().modules()]


@pytest.mark.parametrize("stage", [-1, True, 1.0, "1", None])
def test_a_stage_is_a_whole_number(stage):
    expected = f"A stage must be a whole number from 0 on, but is {stage!r}."
    with pytest.raises(ConfigError) as caught:
        set_partition(nn.Linear(1, 1), stage)
    assert str(caught.value) == expected
    with pytest.raises(ConfigError) as caught, partition(stage):
        pass
    assert str(caught.value) == expected


@pytest.mark.parametrize("module", [nn.ReLU(), nn.ModuleList(), nn.Sequential(nn.Dropout())])
def test_a_module_without_parameters_has_no_stage(module):
    with pytest.raises(ConfigError, match=f"got a {type(module).__name__} without parameters. Such a module runs on"):
        set_partition(module, 1)


# --- units ----------------------------------------------------------------------------------------------------------


def names(model: nn.Module, stages: dict[str, int | None], *, unit_classes=()) -> list[str]:
    """Units if the modules named in ``stages`` are placed, and those around them are not."""

    def stage_of(name: str) -> int | None:
        while name not in stages and name:
            name = name.rpartition(".")[0]
        return stages.get(name)

    return [found.name for found in choose_units(model, 1, unit_classes, stage_of=stage_of)]


WHOLE = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.parametrize(
    "stages", [{}, {"": 0}, {"blocks": 1, "head": 0}, {"blocks.1": 1, "blocks.1.mlp": 1, "blocks.2.mlp.1": 3}]
)
def test_units_stay_whole_as_long_as_they_are_on_one_stage(stages):
    assert names(Model(), stages) == WHOLE


@pytest.mark.parametrize("rest", [None, 0])
def test_a_unit_with_parts_on_other_stages_is_opened(rest):
    opened = [*WHOLE[:2], "blocks.1.norm", "blocks.1.mlp", *WHOLE[3:]]
    assert names(Model(), {"": rest, "blocks.1.mlp": 1}) == opened


def test_a_unit_is_opened_as_far_as_needed():
    found = names(Model(), {"": 0, "blocks.1.mlp.2": 1})
    assert found == [*WHOLE[:2], "blocks.1.norm", "blocks.1.mlp.0", "blocks.1.mlp.2", *WHOLE[3:]]


def test_a_unit_is_opened_for_a_layer_that_has_all_of_its_parameters():
    model = Model()
    model.wrapped = nn.Sequential(nn.GELU(), nn.Linear(4, 4))
    assert names(model, {"": 0, "wrapped.1": 1}) == [*WHOLE, "wrapped.1"]


def test_parameters_of_an_opened_unit_belong_to_the_glue():
    model = Model()
    model.blocks[0].scale = nn.Parameter(torch.ones(4))
    assert names(model, {"": 0, "blocks.0.mlp": 1})[1:3] == ["blocks.0.norm", "blocks.0.mlp"]


def attention() -> nn.Module:
    model = Model()
    model.blocks[0].attention = nn.MultiheadAttention(4, 2)
    return model


def marked() -> nn.Module:
    model = Model()
    unit(model.blocks[0])
    return model


def declared() -> nn.Module:
    model = Model()
    model._no_split_modules = ["Block"]
    return model


@pytest.mark.parametrize(
    ("build", "part", "whole", "reason"),
    [
        (attention, "blocks.0.attention.out_proj", "blocks.0.attention", "a MultiheadAttention of PyTorch"),
        (marked, "blocks.0.mlp", "blocks.0", "marked with `unit`"),
        (declared, "blocks.2.norm", "blocks.2", "Block is one of the model's `_no_split_modules`"),
        (Model, "blocks.2.norm", "blocks.2", "one of `unit_classes`"),
    ],
)
@pytest.mark.parametrize(("rest", "where"), [(0, "on stage 0"), (None, "nowhere")])
def test_what_must_stay_whole_is_on_one_stage(build, part, whole, reason, rest, where):
    with pytest.raises(ConfigError) as caught:
        names(build(), {"": rest, part: 1}, unit_classes=["Block"] if "classes" in reason else [])
    assert str(caught.value) == (
        f"`{whole}` must stay whole on one stage ({reason}), but `{part}` in it is placed on stage 1 and `{whole}` "
        f"itself {where}. Place the whole of it."
    )
