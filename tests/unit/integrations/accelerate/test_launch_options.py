"""A layout on its way from the launcher's file to its processes, without any process."""

import os

import pytest

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.parsing import as_text, parse
from smp_strategy.config.variables import is_selected
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate.launch_options import LaunchOptions, check_processes


def test_a_recipe_is_one_variable():
    assert LaunchOptions("pp2_sdp2").variables({}) == {"ACCELERATE_USE_SMP": "true", "SMP_CONFIG": "pp2_sdp2"}


@pytest.mark.parametrize("node", [None, True, {}])
def test_an_empty_node_selects_and_says_nothing_else(node):
    assert LaunchOptions(node).variables({}) == {"ACCELERATE_USE_SMP": "true"}


NODE = {
    "pipeline_parallel_degree": 2,
    "microbatches": None,
    "auto_partition": True,
    "memory_limit": ["16GiB", 3_000_000],
    "stage_speeds": [1, 2.5],
    "unit_classes": ["Block"],
    "tensor_parallel_degree": 2,
    "tensor_parallel": {"*.mlp.up": "column", "*.mlp.down": "row"},
    "activation_checkpointing": ["encoder.*"],
    "pipeline": "1f1b",
}


def test_every_kind_of_value_comes_out_of_the_variables_as_it_went_in():
    variables = LaunchOptions(NODE).variables({})
    assert variables["SMP_PIPELINE_PARALLEL_DEGREE"] == "2"
    assert SMPConfig.from_variables(variables) == SMPConfig(**NODE)


def test_a_recipe_and_options_go_together_and_the_option_wins():
    config = SMPConfig.from_variables(LaunchOptions({"recipe": "pp2_sdp2", "microbatches": 6}).variables({}))
    assert (config.pipeline_parallel_degree, config.sharded_data_parallel_degree, config.microbatches) == (2, 2, 6)


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ({"SMP_PIPELINE_PARALLEL_DEGREE": "4"}, (4, 8)),
        ({"SMP_PARTITIONS": "4"}, (4, 8)),
        ({"SMP_CONFIG": "pp4"}, (4, 8)),
        ({"SMP_MICROBATCHES": "2"}, (2, 2)),
    ],
)
@pytest.mark.parametrize("name", ["pipeline_parallel_degree", "partitions"])
def test_variables_of_the_shell_win(shell, name, expected):
    variables = {**shell, **LaunchOptions({name: 2, "microbatches": 8}).variables(shell)}
    config = SMPConfig.from_variables(variables)
    assert (config.pipeline_parallel_degree, config.microbatches) == expected


def test_a_recipe_of_the_shell_replaces_that_of_the_file():
    assert "SMP_CONFIG" not in LaunchOptions("pp2_sdp2").variables({"SMP_CONFIG": "pp4"})


def test_unknown_names_are_refused_together_with_the_nearest_known_ones():
    with pytest.raises(ConfigError) as caught:
        LaunchOptions({"pipeline_paralel_degree": 2, "microbatch": 4, 3: 4})
    first, second, third = caught.value.problems
    assert first.startswith("In `smp_config`: `pipeline_paralel_degree` is not an option. Did you mean `pipeline_par")
    assert "Did you mean `microbatches`?" in second
    assert "`3` is not an option. Known options: " in third


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("pp2_nonsense", "In `smp_config`: .*'nonsense' is not understood"),
        ({"recipe": "pq2"}, "In `smp_config`: .*'pq2' is not understood"),
        ([2], r"must hold options by their names, or a recipe like pp2, but is \[2\]"),
        (2, "must hold options by their names"),
        ({"unit_classes": ["a,b"]}, r"`unit_classes` is \('a,b',\), which cannot be written as text"),
        ({"loss_in_model": "banana"}, "In `smp_config`: `loss_in_model` must be one of auto, True, False, but is 'ban"),
        ({"loss_reduction": "max"}, "In `smp_config`: `loss_reduction` must be one of mean, sum, but is 'max'"),
        ({"training_outputs": None}, "In `smp_config`: `training_outputs` must be one of all, loss, but is 'none'"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, r"In `smp_config`: `partitions` \(2\) is an alias of `pip"),
        ({"tensor_parallel": {"a=b": "row"}}, "Give it in the script: SMPPlugin"),
    ],
)
def test_what_cannot_be_handed_on_is_refused(node, message):
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(node)


@pytest.mark.parametrize(
    ("node", "num_processes", "message"),
    [
        ("pp2", 3, r"must divide .* is 2. .* `num_processes` \(3\) counts"),
        ("pp2_sdp2", 6, "`sharded_data_parallel_degree` must divide the number of replicas"),
        ("tp2", 3, "`tensor_parallel_degree` must divide"),
        ({"microbatches": "eight"}, 2, "`microbatches` must be .* but is 'eight'"),
        ({"microbatches": 0}, 2, "`microbatches` must be at least 1"),
        ("pp2", 4, "must be a multiple of `num_machines`"),
    ],
)
def test_what_could_not_be_trained_is_refused_before_a_process_starts(node, num_processes, message):
    with pytest.raises(ConfigError, match=message):
        check_processes(LaunchOptions(node).variables({}), num_processes, num_machines=3 if num_processes == 4 else 1)


def test_layouts_that_fit_pass():
    for node, num_processes in ((None, 3), ("pp2", 4), ("pp2_sdp2", 8), ("tp2_pp2", 4), ("zero1", 3)):
        check_processes(LaunchOptions(node).variables({}), num_processes)


def test_a_variable_of_the_shell_that_is_nearly_an_option_is_refused():
    with pytest.raises(ConfigError, match="SMP_PARTITION names no option of smp_strategy. Did you mean SMP_PARTITIONS"):
        check_processes({"SMP_PARTITION": "2"}, 2)


def test_wrong_values_of_options_of_accelerate_are_refused_before_a_process_starts():
    with pytest.raises(ConfigError, match="`loss_in_model` must be one of auto, True, False, but is 'banana'"):
        check_processes({"SMP_LOSS_IN_MODEL": "banana"}, 2)


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("1", True), ("False", False), ("", None)])
def test_the_switch_is_true_or_false(text, expected):
    assert is_selected({"ACCELERATE_USE_SMP": text}) is expected
    assert is_selected({}) is None


def test_another_word_in_the_switch_is_refused():
    with pytest.raises(ConfigError, match="ACCELERATE_USE_SMP must be true or false, but is 'maybe'"):
        is_selected({"ACCELERATE_USE_SMP": "maybe"})


def test_the_environment_of_this_process_has_no_say_in_a_config_from_variables(monkeypatch):
    monkeypatch.setitem(os.environ, "SMP_PIPELINE_PARALLEL_DEGREE", "4")
    assert SMPConfig.from_variables({}) == SMPConfig()


@pytest.mark.parametrize(
    ("value", "hint"),
    [(True, bool), (None, int | None), (3, int), (2.5, float), ("a", str), (("a",), str | tuple[str, ...])],
)
def test_text_is_read_as_the_value_that_it_was_written_from(value, hint):
    assert parse(as_text(value), hint) == value
