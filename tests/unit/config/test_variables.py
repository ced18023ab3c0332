"""Options from environment variables, and variables of other programs."""

import os

import pytest

from smp_strategy.config.config import SMPConfig, option_types
from smp_strategy.config.variables import note_on_others
from smp_strategy.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_smp_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SMP_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SMP_PIPELINE_PARALLEL_DEGREE", "4", "pipeline_parallel_degree", 4),
        ("SMP_PARTITIONS", "4", "pipeline_parallel_degree", 4),
        ("SMP_MICROBATCHES", "none", "microbatches", None),
        ("SMP_MICROBATCHES", "", "microbatches", None),
        ("SMP_SKIP_TRACING", "True", "skip_tracing", True),
        ("SMP_SKIP_TRACING", "0", "skip_tracing", False),
        ("SMP_MEMORY_WEIGHT", "0.25", "memory_weight", 0.25),
        ("SMP_PIPELINE", "simple", "pipeline", "simple"),
        ("SMP_PARTITION_FILE", "/tmp/p.json", "partition_file", "/tmp/p.json"),
    ],
)
def test_a_variable_sets_the_option_of_its_name(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    assert getattr(SMPConfig.from_options(), name) == value


def test_arguments_win_over_variables(monkeypatch):
    monkeypatch.setenv("SMP_PIPELINE_PARALLEL_DEGREE", "4")
    monkeypatch.setenv("SMP_MICROBATCHES", "8")
    config = SMPConfig.from_options(partitions=2)
    assert (config.pipeline_parallel_degree, config.microbatches) == (2, 8)


def test_single_variables_win_over_the_recipe_variable(monkeypatch):
    monkeypatch.setenv("SMP_CONFIG", "pp4_mb16")
    monkeypatch.setenv("SMP_MICROBATCHES", "32")
    config = SMPConfig.from_options()
    assert (config.pipeline_parallel_degree, config.microbatches) == (4, 32)


def test_microbatches_of_a_recipe_follow_the_degree_that_wins_over_it(monkeypatch):
    monkeypatch.setenv("SMP_CONFIG", "pp2")
    assert SMPConfig.from_options(pipeline_parallel_degree=4).num_microbatches(4) == 16
    assert SMPConfig.from_options(pipeline_parallel_degree=4, microbatches=3).num_microbatches(4) == 3
    monkeypatch.setenv("SMP_PARTITIONS", "3")
    assert SMPConfig.from_options().num_microbatches(3) == 12
    monkeypatch.setenv("SMP_CONFIG", "pp2_mb6")
    assert SMPConfig.from_options().num_microbatches(3) == 6


def test_a_variable_beside_an_argument_of_a_door_is_refused_with_the_argument(monkeypatch):
    monkeypatch.setenv("SMP_TIMEOUT", "30")
    with pytest.raises(ConfigError, match=r"SMP_TIMEOUT is not read. Give `SMPStrategy\(timeout=...\)`"):
        SMPConfig.from_options()


def test_a_variable_that_does_not_parse_is_told_with_its_text(monkeypatch):
    monkeypatch.setenv("SMP_MICROBATCHES", "many")
    with pytest.raises(ConfigError, match="`microbatches` must be int \\| None, but is 'many'"):
        SMPConfig.from_options()


def test_an_empty_item_is_told_with_its_variable(monkeypatch):
    monkeypatch.setenv("SMP_STAGE_SPEEDS", "1,,2")
    with pytest.raises(ConfigError) as failure:
        SMPConfig.from_options()
    assert str(failure.value) == (
        "`stage_speeds` has an empty item: (1.0, '', 2.0). Leave it out, or write what belongs there. `stage_speeds` "
        "comes from the environment variable SMP_STAGE_SPEEDS."
    )


def test_a_wrong_recipe_variable_is_told(monkeypatch):
    monkeypatch.setenv("SMP_CONFIG", "pq2")
    with pytest.raises(ConfigError, match="the part 'pq2' is not understood"):
        SMPConfig.from_options()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SMP_MICROBATCH", "SMP_MICROBATCHES"),
        ("SMP_PARTITION", "SMP_PARTITIONS"),
        ("SMP_PIPELINE_PARALLEL_SIZE", "SMP_PIPELINE_PARALLEL_DEGREE"),
        ("SMP_LOSS_REDUCTIONS", "SMP_LOSS_REDUCTION"),
        ("SMP_CONFIGS", "SMP_CONFIG"),
    ],
)
def test_a_variable_that_is_nearly_an_option_is_refused(monkeypatch, variable, meant):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ConfigError, match=f"{variable} names no option of smp_strategy. Did you mean {meant}[?] Rena"):
        SMPConfig.from_options()


OF_OTHERS = (
    "SMP_D2D_GPU_BUFFER_SIZE_BYTES",
    "SMP_DISABLE_D2D",
    "SMP_ENABLE_CROSS_NODE_D2D",
    "SMP_FOO",
    "SMP_LOG_LEVEL",
)


@pytest.mark.parametrize("variable", [*OF_OTHERS, "SMP_NCCL_THROTTLE_LIMIT", "SMP_CONFIG_PATH", "SMP_HOME"])
def test_variables_of_other_programs_are_no_mistake(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert SMPConfig.from_options() == SMPConfig()


def test_one_note_names_the_variables_of_other_programs():
    environ = {"SMP_FOO": "1", "SMP_DISABLE_D2D": "0", "SMP_MICROBATCHES": "2", "SMP_LOSS_IN_MODEL": "auto", "PATH": ""}
    assert note_on_others(environ, option_types()) == (
        "Environment variables that name no option of smp_strategy have no effect on it: SMP_DISABLE_D2D (of "
        "SageMaker's library), SMP_FOO."
    )
    assert note_on_others({"SMP_CONFIG": "pp2", "SMP_PARTITIONS": "2"}, option_types()) is None


@pytest.mark.parametrize("other", ["SMP_PARTITIONS", "SMP_pipeline_parallel_degree"])
def test_two_variables_of_one_option_must_agree(other):
    environ = {"SMP_PIPELINE_PARALLEL_DEGREE": "4", other: "2"}
    named = f"{other}=2" if other.isupper() else "SMP_PIPELINE_PARALLEL_DEGREE=4"
    with pytest.raises(ConfigError, match=f"{named} and SMP_.* are the same option, but they differ. Unset one"):
        SMPConfig.from_variables(environ)
    assert SMPConfig.from_variables({**environ, other: "4"}).pipeline_parallel_degree == 4


def test_an_alias_beside_the_default_of_its_option_counts():
    assert SMPConfig.from_options(partitions=2, pipeline_parallel_degree=None).pipeline_parallel_degree == 2


@pytest.mark.parametrize(
    "variable", ["SMP_AUTOLOAD", "SMP_START_TIME", "SMP_FULL_TRACEBACK", "SMP_LAUNCHER", "SMP_PROFILE"]
)
def test_variables_of_other_parts_are_left_alone(monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    assert SMPConfig.from_options() == SMPConfig()
