"""Partition files: required content, and errors for files that do not fit."""

import json

import pytest

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.errors import ConfigError
from smp_strategy.planning.output_file import write_atomically
from smp_strategy.planning.partition.user_partition import read_partition

SIZES = {"embed": 100, "blocks.0": 10, "blocks.1": 10, "head": 100}


def saved(*, num_stages=2, **stages) -> str:
    placed = {"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1, **stages}
    units = [{"name": name, "stage": stage, "num_parameters": SIZES.get(name, 1)} for name, stage in placed.items()]
    return json.dumps({"format": 1, "num_stages": num_stages, "units": units, "remark": "not read"})


def changed(change) -> str:
    data = json.loads(saved())
    change(data)
    return json.dumps(data)


def refusal(text: str, sizes=SIZES, num_stages=2) -> str:
    with pytest.raises(ConfigError) as caught:
        read_partition(text, "p.json").place(sizes, num_stages)
    return str(caught.value)


def test_stages_may_be_changed_by_hand():
    assert read_partition(saved(embed=1), "p.json").place(SIZES, 2) == {
        "embed": 1, "blocks.0": 0, "blocks.1": 1, "head": 1
    }  # fmt: skip


def test_the_order_of_the_units_does_not_count():
    text = changed(lambda data: data["units"].reverse())
    assert list(read_partition(text, "p.json").place(SIZES, 2).items())[0] == ("embed", 0)


def test_a_file_that_names_units_and_stages_only_is_enough():
    text = changed(lambda data: [unit.pop("num_parameters") for unit in data["units"]])
    assert read_partition(text, "p.json").place(SIZES, 2)["head"] == 1


NOT_FOR_THIS = "The partition in p.json does not fit. "


def test_another_number_of_stages_is_refused():
    assert refusal(saved(), num_stages=4) == (
        NOT_FOR_THIS + "It is for 2 stages, but there are 4. Set `pipeline_parallel_degree=2`, or make a partition "
        "for 4."
    )


def test_another_number_of_chunks_is_refused_where_the_schedule_has_one():
    partition = read_partition(changed(lambda data: data.update(chunks_per_stage=2)), "p.json")
    with pytest.raises(ConfigError) as caught:
        partition.place(SIZES, 2, 3)
    assert str(caught.value) == (
        NOT_FOR_THIS
        + "It has 2 chunks per stage, but the schedule is for 3. Set `virtual_pipeline_degree=2`, or make a "
        "partition for 3."
    )
    assert partition.place(SIZES, 2, 2) == partition.place(SIZES, 2)


def test_a_unit_that_the_model_does_not_have_is_named_with_the_nearest():
    sizes = {"embed": 100, "block.0": 10, "block.1": 10, "head": 100}
    assert refusal(saved(), sizes) == (
        NOT_FOR_THIS + "Unit 1 of the file is `blocks.0`, which is no unit of this model (`block.0`, perhaps?)."
    )


def test_a_unit_that_the_file_does_not_have_is_named():
    assert refusal(saved(), {**SIZES, "norm": 1}) == (
        NOT_FOR_THIS + "Unit 4 of this model is `norm`, which is not in the file."
    )


def test_a_unit_of_another_size_is_named_with_both_sizes():
    assert refusal(saved(), {**SIZES, "blocks.1": 40}) == (
        NOT_FOR_THIS + "Unit 2 of the file, `blocks.1`, has 10 parameters there, but 40 in this model."
    )


def test_the_first_difference_is_told_alone():
    assert "`blocks.0`" in refusal(saved(), {"embed": 100, "head": 7})


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ({"head": 2}, "`head` is placed on stage 2, but with 2 stages these are numbered 0 to 1."),
        ({"head": -1}, "`head` is placed on stage -1, but"),
        ({"blocks.1": 0, "head": 0}, "No unit is on stage 1. Place one of `embed`"),
    ],
)
def test_stages_are_checked_like_those_by_hand(stages, problem):
    assert refusal(saved(**stages)).startswith(NOT_FOR_THIS + problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "p.json is not valid JSON: Expecting property name"),
        ("[" * 100_000, "p.json is no partition: its JSON is nested too deeply. Write a new one"),
        ('{"format": ' + "1" * 5000 + "}", "p.json is not valid JSON: Exceeds the limit"),
        ("[1]", "p.json is no partition of format 1: its `format` is None. Write a new one with `partition_file`."),
        (changed(lambda data: data.pop("format")), "p.json is no partition of format 1: its `format` is None."),
        (changed(lambda data: data.update(format=2)), "p.json is no partition of format 1: its `format` is 2."),
        (changed(lambda data: data.pop("units")), "`units` of p.json must be a list, but is None."),
        (
            changed(lambda data: data.update(num_stages="2")),
            "`num_stages` of p.json must be a whole number, but is '2'.",
        ),
        (
            changed(lambda data: data.update(chunks_per_stage=None)),
            "`chunks_per_stage` of p.json must be a whole number, but is None.",
        ),
        (
            changed(lambda data: data["units"][2].update(num_parameters="10")),
            "`num_parameters` of unit 2 of p.json must be a whole number, but is '10'.",
        ),
        (changed(lambda data: data["units"].append(3)), "Unit 4 of p.json must be an object with a name and a stage."),
        (changed(lambda data: data["units"][1].pop("name")), "`name` of unit 1 of p.json must be a text, but is None."),
        (
            changed(lambda data: data["units"][1].update(stage=True)),
            "`stage` of unit 1 of p.json must be a whole number, but is True.",
        ),
        (
            changed(lambda data: data["units"].append(data["units"][0])),
            "p.json has two units of the name `embed`. Remove one.",
        ),
    ],
)
def test_a_file_that_is_no_partition_is_refused_with_the_place(text, problem):
    assert refusal(text).startswith(problem)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "p.json"
    write_atomically(path, "first")
    assert path.read_text() == "first"
    monkeypatch.setattr("pathlib.Path.replace", lambda self, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, "second")
    assert path.read_text() == "first"
    assert [entry.name for entry in path.parent.iterdir()] == ["p.json"]


def test_what_units_keep_is_read_where_the_file_says_it():
    relief = {"treatment": {"recompute": "all", "offload": True}}
    text = changed(lambda data: data["units"][0].update(relief=relief))
    name = json.loads(text)["units"][0]["name"]
    assert read_partition(text, "p.json").activation_policies == {name: ActivationPolicy(recompute="all", offload=True)}


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (
            {"recompute": "some"},
            "`recompute` in `relief` of unit 0 of p.json must be one of no, all, cheap, but is 'some'.",
        ),
        ({"again": True}, "`treatment` in `relief` of unit 0 of p.json has a field that is not known"),
        (None, "`treatment` of `relief` of unit 0 of p.json must be an object, but is None."),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(policy, problem):
    text = changed(lambda data: data["units"][0].update(relief={"treatment": policy}))
    with pytest.raises(ConfigError) as failure:
        read_partition(text, "p.json")
    assert problem in str(failure.value)
