"""Configuration: accepted and refused options, and all mistakes reported at once."""

import dataclasses
import os
import re
import subprocess
import sys
import typing

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smp_strategy.config.config import Schedule, SMPConfig
from smp_strategy.config.options import PartitionOptions, PipelineOptions
from smp_strategy.config.recipe import named_replicas, parse_recipe
from smp_strategy.errors import ConfigError, SMPError, printable


@pytest.fixture(autouse=True)
def _no_smp_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SMP_")]:
        monkeypatch.delenv(name)


# --- values ---------------------------------------------------------------------------------------------------------


def test_no_option_has_to_be_given():
    config = SMPConfig()
    assert config.pipeline_parallel_degree is None
    assert config.microbatches is None
    assert config.pipeline == "interleaved"
    assert config.optimize == "speed"


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMPConfig().microbatches = 3


def test_options_are_given_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        SMPConfig(2)


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_degree", "virtual_pipeline_degree", "microbatches", "active_microbatches"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_start_at_one(name, value):
    with pytest.raises(ConfigError, match=f"`{name}` must be at least 1, but is {value}"):
        SMPConfig(**{name: value})


@pytest.mark.parametrize("value", [10_001, 10**6, 10**30])
def test_more_microbatches_than_can_be_planned_are_refused(value):
    with pytest.raises(ConfigError, match=f"`microbatches` must be at most 10000, but is {value}: the schedule has"):
        SMPConfig(microbatches=value)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("microbatches", "8", "int | None, but is '8' (str)"),
        ("microbatches", 8.0, "int | None, but is 8.0 (float)"),
        ("microbatches", True, "int | None, but is True (bool)"),
        ("pipeline_parallel_degree", [2], "int | None, but is [2] (list)"),
        ("optimize", 1, "but is 1 (int)"),
        ("skip_tracing", 1, "bool, but is 1 (int)"),
        ("partition_file", 7, "str | None, but is 7 (int)"),
        ("memory_weight", "0.5", "float | None, but is '0.5' (str)"),
        ("tensor_parallel_degree", None, "int, but is None (NoneType)"),
        ("stage_speeds", ["fast"], "but is ('fast',) (tuple)"),
        ("memory_limit", 1.5, "but is 1.5 (float)"),
        ("memory_limit", [1.5], "but is (1.5,) (tuple)"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(name, value, shown):
    with pytest.raises(ConfigError) as caught:
        SMPConfig(**{name: value})
    assert f"`{name}` must be " in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("pipeline", "zb"), ("pipeline", "Interleaved"), ("trace_device", "tpu"), ("optimize", "time")),
        *(("optimize", ""), ("stage_transport", "ucc"), ("stage_transport", "")),
    ],
)
def test_choices_are_listed_when_none_is_hit(name, value):
    with pytest.raises(ConfigError, match=f"`{name}` must be one of .*, but is '{value}'"):
        SMPConfig(**{name: value})


@pytest.mark.parametrize("value", ["cluster", "spread", "DPT", "TPD", "PDT"])
def test_placements_are_two_words_or_a_permutation(value):
    assert SMPConfig(placement_strategy=value).placement_strategy == value


@pytest.mark.parametrize("value", ["", "D", "DPP", "dpt", "DPTX", "clusters"])
def test_other_placements_are_refused(value):
    with pytest.raises(ConfigError, match="permutation of the letters D, P and T"):
        SMPConfig(placement_strategy=value)


@pytest.mark.parametrize("value", [0, 0.5, 1, 1.0])
def test_memory_weight_may_be_any_part_of_one(value):
    assert SMPConfig(memory_weight=value).resolved_memory_weight == value


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_memory_weight_outside_of_zero_to_one_is_refused(value):
    with pytest.raises(ConfigError, match="`memory_weight` must be between 0 and 1"):
        SMPConfig(memory_weight=value)


@pytest.mark.parametrize(("optimize", "weight"), [("memory", 0.8), ("speed", 0.2)])
def test_optimize_sets_the_default_of_memory_weight(optimize, weight):
    assert SMPConfig(optimize=optimize).resolved_memory_weight == weight


@pytest.mark.parametrize(
    ("limit", "per_stage"),
    [
        (None, None),
        (4096, (4096,) * 3),
        ("16GiB", (16 * 2**30,) * 3),
        (("1GiB", 2**20, "1MB"), (2**30, 2**20, 10**6)),
    ],
)
def test_a_memory_limit_is_one_for_all_stages_or_one_for_each(limit, per_stage):
    assert PartitionOptions(memory_limit=limit).memory_limits(3) == per_stage


@pytest.mark.parametrize("value", [0, -1, "0GiB", ["1GiB", 0]])
def test_a_memory_limit_below_one_byte_is_refused(value):
    with pytest.raises(ConfigError, match="`memory_limit` must be at least 1 byte, but is"):
        SMPConfig(memory_limit=value)


@pytest.mark.parametrize("value", ["much", "16GiBs", "", ["1GiB", "-1GiB"]])
def test_a_memory_limit_that_is_no_amount_of_memory_is_refused(value):
    with pytest.raises(ConfigError, match="`memory_limit`: .* is no amount of memory. Write a number and one of B, "):
        SMPConfig(memory_limit=value)


@pytest.mark.parametrize("name", ["memory_limit", "stage_speeds"])
def test_a_list_needs_one_entry_per_stage(name):
    with pytest.raises(ConfigError, match=f"`{name}` must have one entry for each of the 3 stages, but has 2: "):
        SMPConfig(**{name: [1, 2], "pipeline_parallel_degree": 3})


def test_stages_are_of_the_same_speed_unless_their_speeds_are_given():
    assert PartitionOptions().speeds(2) == (1.0, 1.0)
    assert PartitionOptions(stage_speeds=(1, 2.5)).speeds(2) == (1.0, 2.5)


@pytest.mark.parametrize("value", [[1, 0], [-1.0], [float("nan")], [float("inf")]])
def test_a_stage_without_a_speed_is_refused(value):
    with pytest.raises(ConfigError, match="`stage_speeds` must be above 0 and finite, but are"):
        SMPConfig(stage_speeds=value)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({}, 1),
        ({"pipeline": "1f1b", "virtual_pipeline_degree": 3}, 3),
        ({"pipeline": "zb-v"}, 2),
        ({"pipeline": "auto"}, None),
    ],
)
def test_the_schedule_sets_the_default_of_the_virtual_degree(options, chunks):
    assert PipelineOptions(**options).chunks_per_stage == chunks


# --- combinations ---------------------------------------------------------------------------------------------------


def test_reading_a_partition_needs_a_file():
    with pytest.raises(ConfigError, match="`load_partition` needs `partition_file`"):
        SMPConfig(load_partition=True)


def test_a_default_stage_contradicts_automatic_partition():
    with pytest.raises(ConfigError, match="`default_partition` \\(0\\) contradicts `auto_partition=True`"):
        SMPConfig(default_partition=0)


@pytest.mark.parametrize(("value", "bound"), [(-1, "at least 0"), (2, "one of the 2 stages, 0 to 1")])
def test_a_default_stage_must_exist(value, bound):
    with pytest.raises(ConfigError, match=f"`default_partition` must be {bound}, but is {value}"):
        SMPConfig(auto_partition=False, default_partition=value, pipeline_parallel_degree=2)


def test_a_partition_comes_from_a_file_or_from_the_modules():
    with pytest.raises(ConfigError, match="`load_partition=True` contradicts `auto_partition=False`"):
        SMPConfig(load_partition=True, partition_file="p.json", auto_partition=False)


@pytest.mark.parametrize("pipeline", ["zb-h1", "zb-h2"])
def test_zero_bubble_without_a_fold_has_one_chunk_per_stage(pipeline):
    with pytest.raises(ConfigError, match=f"`virtual_pipeline_degree` \\(2\\) contradicts `pipeline={pipeline}`"):
        SMPConfig(pipeline=pipeline, virtual_pipeline_degree=2)


@pytest.mark.parametrize("chunks", [1, 3])
def test_zb_v_has_two_chunks_per_stage(chunks):
    with pytest.raises(ConfigError, match=f"`virtual_pipeline_degree` \\({chunks}\\) contradicts `pipeline=zb-v`"):
        SMPConfig(pipeline="zb-v", virtual_pipeline_degree=chunks)


@pytest.mark.parametrize("options", [{"microbatches": 3}, {}], ids=["microbatches given", "4 per stage"])
def test_all_forwards_first_needs_all_microbatches_active(options):
    config = {"pipeline": "simple", "active_microbatches": 2, **options}
    with pytest.raises(ConfigError, match="`active_microbatches` \\(2\\) contradicts `pipeline=simple`"):
        SMPConfig(**config).check(2)
    SMPConfig(**config | {"active_microbatches": 8}).check(2)


@pytest.mark.parametrize("name", ["memory_limit", "stage_speeds", "default_partition", "active_microbatches"])
def test_what_depends_on_the_number_of_stages_is_refused_at_once_where_it_is_given(name):
    value = {"memory_limit": [1], "stage_speeds": [1], "default_partition": 2, "active_microbatches": 1}[name]
    with pytest.raises(ConfigError, match=f"`{name}` .*"):
        SMPConfig(pipeline_parallel_degree=2, microbatches=2, pipeline="simple", **{name: value})


@pytest.mark.parametrize(
    "measured", [{"trace_execution_times": True}, {"trace_memory_usage": True}, {"trace_device": "cpu"}]
)
def test_nothing_is_measured_without_tracing(measured):
    with pytest.raises(ConfigError, match=f"`{min(measured)}` contradicts `skip_tracing=True`"):
        SMPConfig(skip_tracing=True, **measured)


def test_two_precisions_contradict_each_other():
    with pytest.raises(ConfigError, match="`fp16` and `bf16` contradict"):
        SMPConfig(fp16=True, bf16=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "all"),
        ({"delayed_parameter_initialization": True}, "none"),
        ({"delayed_parameter_initialization": True, "restore_module": "all"}, "all"),
        ({"restore_module": "rank_zero"}, "rank_zero"),
    ],
)
def test_a_module_that_may_fit_on_no_rank_is_made_whole_on_none_unless_somebody_asks(options, expected):
    assert SMPConfig(**options).restored_on == expected


# --- all mistakes together ------------------------------------------------------------------------------------------


def test_every_mistake_is_listed_at_once(monkeypatch):
    monkeypatch.setenv("SMP_MICROBATCHS", "4")
    with pytest.raises(ConfigError) as caught:
        SMPConfig.from_options(
            pipeline="gpipe", microbatches=0, activation_loading_horizon=0, optimise="speed", load_partition=True
        )
    text = str(caught.value)
    assert text.startswith(f"{len(caught.value.problems)} options are wrong:\n  1. ")
    for expected in (
        "SMP_MICROBATCHS names no option",
        "`optimise` is not an option. Did you mean `optimize`?",
        "`microbatches` must be at least 1, but is 0.",
        "`pipeline` must be one of",
        "`activation_loading_horizon` must be at least 1, but is 0.",
        "`load_partition` needs `partition_file`",
    ):
        assert expected in text


def test_one_mistake_is_not_numbered():
    with pytest.raises(ConfigError) as caught:
        SMPConfig(microbatches=0)
    assert str(caught.value) == "`microbatches` must be at least 1, but is 0."
    assert caught.value.problems == (str(caught.value),)


def test_a_config_error_is_an_smp_error_and_a_value_error():
    assert issubclass(ConfigError, SMPError)
    assert issubclass(ConfigError, ValueError)


def test_an_unknown_name_far_from_all_others_shows_the_known_ones():
    with pytest.raises(ConfigError, match="`zzz` is not an option. Known options: activation_checkpointing, "):
        SMPConfig.from_options(zzz=1)


# --- aliases and the environment ------------------------------------------------------------------------------------


def test_partitions_is_an_alias_of_the_degree():
    assert SMPConfig.from_options(partitions=4).pipeline_parallel_degree == 4


def test_an_alias_may_repeat_what_the_name_says():
    assert SMPConfig.from_options(partitions=4, pipeline_parallel_degree=4).pipeline_parallel_degree == 4


def test_an_alias_that_differs_from_the_name_is_refused():
    with pytest.raises(ConfigError, match="`partitions` \\(2\\) is an alias of `pipeline_parallel_degree` \\(4\\)"):
        SMPConfig.from_options(partitions=2, pipeline_parallel_degree=4)


# --- what follows from the options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [None, 3])
def test_stages_get_some_microbatches_each_also_where_their_number_is_given(degree):
    assert SMPConfig(pipeline_parallel_degree=degree).num_microbatches(3) == 12


def test_a_single_stage_has_no_idle_time_to_fill_with_microbatches():
    assert SMPConfig().num_microbatches(1) == 1


def test_given_microbatches_are_taken():
    assert SMPConfig(microbatches=5).num_microbatches(3) == 5


# --- recipes --------------------------------------------------------------------------------------------------------

_NAMES = {
    "pipeline_parallel_degree": "pp",
    "virtual_pipeline_degree": "v",
    "tensor_parallel_degree": "tp",
    "sharded_data_parallel_degree": "sdp",
    "microbatches": "mb",
}


@given(st.dictionaries(st.sampled_from(sorted(_NAMES)), st.integers(1, 4096), min_size=1), st.randoms())
def test_a_recipe_says_what_its_name_says(options, random):
    parts = [f"{_NAMES[name]}{value}" for name, value in options.items()]
    random.shuffle(parts)
    parsed = parse_recipe("_".join(parts))
    with_one_stage = {"sharded_data_parallel_degree", "tensor_parallel_degree"}
    if with_one_stage.intersection(options) and "pipeline_parallel_degree" not in options:
        assert parsed.pop("pipeline_parallel_degree") == 1
    assert parsed == options


@given(st.text(max_size=12))
def test_any_other_name_is_a_config_error(name):
    recipe = r"((pp|v|tp|sdp|mb)\d+|mics\d+x\d+|zero1|interleaved|simple|1f1b|zbh1|zbh2|zbv|auto)"
    assume(not re.fullmatch(rf"{recipe}(_{recipe})*", name))
    with pytest.raises(ConfigError, match=re.escape(printable(f"`smp={name}`: the part "))):
        parse_recipe(name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sdp2", {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 1}),
        ("mics2x4", {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 1}),
        ("zero1", {"shard_optimizer_state": True, "pipeline_parallel_degree": 1}),
        ("zero1_mb4", {"shard_optimizer_state": True, "pipeline_parallel_degree": 1, "microbatches": 4}),
        ("pp2_sdp4", {"sharded_data_parallel_degree": 4, "pipeline_parallel_degree": 2}),
        ("tp2_mb4", {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "microbatches": 4}),
        ("tp2_sdp2", {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 1}),
        ("1f1b", {"pipeline": "1f1b"}),
        ("zbv_pp2_mb4", {"pipeline": "zb-v", "pipeline_parallel_degree": 2, "microbatches": 4}),
        ("v2_1f1b", {"pipeline": "1f1b", "virtual_pipeline_degree": 2}),
    ],
)
def test_recipes_name_every_kind_of_parallelism(name, options):
    assert parse_recipe(name) == options


@pytest.mark.parametrize(
    ("name", "part"), [("", "''"), ("pp", "'pp'"), ("pp2_", "''"), ("pp2-mb4", "'pp2-mb4'"), ("zero3", "'zero3'")]
)
def test_the_part_that_is_not_understood_is_shown(name, part):
    with pytest.raises(ConfigError, match=f"the part {part} is not understood"):
        parse_recipe(name)


@pytest.mark.parametrize("name", ["pp2_pp4", "mb4_pp2_mb8", "sdp2_mics2x2", "zero1_zero1", "1f1b_zbv"])
def test_a_part_that_stands_twice_is_refused(name):
    with pytest.raises(ConfigError, match="is given twice"):
        parse_recipe(name)


@pytest.mark.parametrize(("name", "replicas"), [("mics2x4", 4), ("pp2_mics4x2_mb8", 2), ("sdp2", 1), ("", 1)])
def test_a_name_speaks_of_replicas_or_of_one(name, replicas):
    assert named_replicas(name) == replicas


@pytest.mark.parametrize("schedule", typing.get_args(Schedule))
def test_every_schedule_can_be_named_in_a_recipe(schedule):
    assert parse_recipe(f"pp2_{schedule.replace('-', '')}")["pipeline"] == schedule


def test_a_degree_of_zero_is_refused_when_the_config_is_built():
    with pytest.raises(ConfigError, match="`smp=pp0_mb1`: pp0 must be pp1 or more"):
        SMPConfig(**parse_recipe("pp0_mb1"))


# --- import ---------------------------------------------------------------------------------------------------------


def test_reading_options_does_not_import_torch():
    code = "import smp_strategy.config.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_classes_of_units_are_given_as_a_list_or_in_the_environment(monkeypatch):
    assert SMPConfig.from_options(unit_classes=["Block"]).unit_classes == ("Block",)
    monkeypatch.setenv("SMP_UNIT_CLASSES", "Block, package.Head")
    assert SMPConfig.from_options().unit_classes == ("Block", "package.Head")
    monkeypatch.delenv("SMP_UNIT_CLASSES")
    with pytest.raises(ConfigError, match="`unit_classes` must be"):
        SMPConfig.from_options(unit_classes=[1])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"checkpoint_strategy": "contiguous"}, "`checkpoint_strategy='contiguous'` contradicts"),
        ({"selective_checkpointing": True}, "`selective_checkpointing=True` contradicts"),
        ({"skip_tracing": True}, "`skip_tracing=True` contradicts"),
    ],
)
def test_what_leaves_the_choice_of_activations_no_choice_is_refused(options, problem):
    with pytest.raises(ConfigError) as failure:
        SMPConfig(activation_checkpointing="auto", memory_limit="1GiB", **options)
    assert f"{problem} `activation_checkpointing=auto`" in str(failure.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (True, "true names no modules. Write `all`"),
        ("off", "off names no modules. Write `none`"),
        ("blocks.*, Yes", " Yes names no modules. Write `all`"),
        (["all", "none"], "'all' stands for all units and beside nothing else"),
        ("auto,blocks.*", "'auto' stands for all units and beside nothing else"),
        (["none"], "'none' stands for all units and beside nothing else"),
        (" none ", "must be written 'none'"),
        ("ALL", "must be written 'all'"),
    ],
)
def test_words_that_are_no_patterns_of_modules_are_refused(given, told):
    with pytest.raises(ConfigError, match=f"`activation_checkpointing=.*{told}"):
        SMPConfig(activation_checkpointing=given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("unit_classes", given) for given in ([""], ["Block", " "])),
        *(("activation_checkpointing", given) for given in ([""], ["blocks.*", ""], "blocks.*,,head", ",", " ")),
        ("memory_limit", ["1GiB", ""]),
        ("stage_speeds", [1, ""]),
    ],
)
def test_an_empty_item_of_a_list_is_refused(name, given):
    shown = tuple(given) if isinstance(given, list) else given
    with pytest.raises(ConfigError) as failure:
        SMPConfig(**{name: given})
    assert str(failure.value) == (f"`{name}` has an empty item: {shown!r}. Leave it out, or write what belongs there.")


def test_lists_that_may_be_empty_are_taken_and_one_for_each_stage_must_not_be():
    assert SMPConfig(unit_classes=[], activation_checkpointing=[]).checkpointing_patterns == ()
    assert SMPConfig(activation_checkpointing="blocks.*,").checkpointing_patterns == ("blocks.*",)
    for name in ("memory_limit", "stage_speeds"):
        with pytest.raises(ConfigError) as failure:
            SMPConfig(**{name: []})
        assert str(failure.value) == (
            f"`{name}` must have one entry for each stage, but has none. Give them, or leave it out."
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 10**400),
        ("loss_scale", 10**400),
        ("sdp_gradient_clipping", -(10**400)),
        ("memory_limit", 10**400),
        ("stage_speeds", [1, 10**400]),
        ("evaluation_microbatches", 10**400),
    ],
)
def test_a_number_that_no_float_holds_is_refused(name, value):
    with pytest.raises(ConfigError) as failure:
        SMPConfig(**{name: value})
    assert str(failure.value) == (
        f"`{name}` must be below 1e308, but has a number of more than 300 digits. Give a smaller one."
    )


def test_amounts_recipes_and_groups_of_too_many_digits_are_refused():
    many = "9" * 5000
    with pytest.raises(ConfigError, match="`memory_limit`: '9+[.]5GiB' is no amount of memory. Write a number and "):
        SMPConfig(memory_limit=f"{many}.5GiB")
    with pytest.raises(ConfigError, match="the part 'pp9+' is not understood"):
        parse_recipe(f"pp{many}")
    with pytest.raises(ConfigError, match="`checkpoint_strategy` must be each, contiguous or group_N with N from 1 on"):
        SMPConfig(checkpoint_strategy=f"group_{many}", activation_checkpointing="all")


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("stage_speeds", "1, 2", "[1.0, 2.0]"),
        ("unit_classes", "Block, Head", "['Block', 'Head']"),
        ("microbatches", "4", "4"),
        ("async_save", "true", "True"),
        ("memory_weight", "none", "None"),
    ],
)
def test_a_text_where_a_value_belongs_is_refused_with_the_value_that_it_means(name, text, meant):
    with pytest.raises(ConfigError) as failure:
        SMPConfig(**{name: text})
    assert str(failure.value).endswith(f", but is {text!r} (str). Write `{meant}`.")


@pytest.mark.parametrize("path", ["", " ", "s3://bucket/partition.json"])
def test_a_partition_file_is_on_this_machine(path):
    with pytest.raises(ConfigError, match="`partition_file` must be the path of a file on this machine"):
        SMPConfig(partition_file=path)


def test_a_partition_file_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert SMPConfig(partition_file="~/x.json").partition_file == "/home/me/x.json"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_of_layers_to_split_and_no_replicas_are_refused(name):
    with pytest.raises(ConfigError, match="`tensor_parallel` has an empty name"):
        SMPConfig(tensor_parallel_degree=2, tensor_parallel={name: "column"})
    with pytest.raises(ConfigError, match="mics2x0 has 0 replicas"):
        parse_recipe("mics2x0")
