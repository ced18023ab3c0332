"""Options of sharded data parallelism: values, options without effect, contradictions."""

import os

import pytest

from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError

SHARDED = {"sharded_data_parallel_degree": 2}


@pytest.fixture(autouse=True)
def _no_smp_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SMP_")]:
        monkeypatch.delenv(name)


def problems(**options) -> list[str]:
    """What is wrong with options, less that their feature is not built yet."""
    try:
        SMPConfig.from_options(**options)
    except ConfigError as error:
        return [text for text in error.problems if "not built" not in text]
    return []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharded_data_parallel_degree": 1},
        {"shard_optimizer_state": True},
        SHARDED,
        SHARDED | {"sdp_reduce_bucket_size": 1, "sdp_max_live_parameters": 1},
        SHARDED | {"sdp_param_persistence_threshold": 1_000_000, "sdp_hierarchical_allgather": False},
        SHARDED | {"sdp_gradient_clipping": 1, "sdp_gather": "step"},
        SHARDED | {"pipeline_parallel_degree": 2, "sdp_gather": "use"},
        {"sdp_gradient_clipping": None, "sdp_gather": "auto", "sdp_param_persistence_threshold": 0},
    ],
    ids=str,
)
def test_options_that_say_something_are_accepted(options):
    assert problems(**options) == []


@pytest.mark.parametrize("name", ["sharded_data_parallel_degree", "sdp_reduce_bucket_size", "sdp_max_live_parameters"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_start_at_one(name, value):
    assert problems(**SHARDED | {name: value}) == [f"`{name}` must be at least 1, but is {value}."]


def test_a_threshold_may_be_zero_but_not_less():
    assert problems(**SHARDED, sdp_param_persistence_threshold=-1) == [
        "`sdp_param_persistence_threshold` must be at least 0, but is -1."
    ]


@pytest.mark.parametrize("norm", [0, 0.0, -1.0, float("nan")])
def test_gradients_are_clipped_to_a_norm_above_zero_or_not_at_all(norm):
    assert problems(**SHARDED, sdp_gradient_clipping=norm) == [
        f"`sdp_gradient_clipping` must be above 0, or None for no clipping, but is {norm}."
    ]


def test_when_to_gather_is_one_of_three_words():
    assert problems(**SHARDED, sdp_gather="once") == ["`sdp_gather` must be one of auto, step, use, but is 'once'."]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("sharded_data_parallel_degree", "2", "int, but is '2' (str)"),
        ("sdp_gather", 1, "but is 1 (int)"),
        ("sdp_gradient_clipping", "1.0", "float | None, but is '1.0' (str)"),
        ("sdp_param_persistence_threshold", 1e5, "int, but is 100000.0 (float)"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(name, value, shown):
    [problem] = problems(**SHARDED | {name: value})
    assert problem.startswith(f"`{name}` must be ")
    assert shown in problem


def test_state_for_shards_can_be_dealt_out_over_replicas():
    assert not problems(**SHARDED, shard_optimizer_state=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sdp_gather": "step", "pipeline_parallel_degree": 1}, "`sdp_gather=step`"),
        ({"sdp_gather": "step", "pipeline_parallel_degree": 2}, "`sdp_gather=step`"),
        ({"pipeline_parallel_degree": 2}, "`sdp_gather=auto` with 2 stages"),
    ],
)
def test_there_is_no_limit_for_what_is_gathered_once_per_step(options, why):
    assert problems(**SHARDED | options, sdp_max_live_parameters=1000) == [
        f"`sdp_max_live_parameters` (1000) limits what is gathered ahead, but {why} gathers everything once per step. "
        "Set `sdp_gather=use`, or leave it out." + (" `sdp_gather=auto` is its default." if "auto" in why else "")
    ]


@pytest.mark.parametrize(
    "options", [{"pipeline_parallel_degree": 1}, {"pipeline_parallel_degree": 2, "sdp_gather": "use"}]
)
def test_there_is_one_for_what_is_gathered_for_each_use(options):
    assert problems(**SHARDED | options, sdp_max_live_parameters=1000) == []


def test_the_limit_is_judged_when_the_number_of_stages_is_known():
    config = SMPConfig.from_options(**SHARDED, sdp_max_live_parameters=1000)
    config.check(1)
    with pytest.raises(ConfigError, match="with 2 stages gathers everything once per step"):
        config.check(2)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sdp_reduce_bucket_size", 1000),
        ("sdp_param_persistence_threshold", 1),
        ("sdp_max_live_parameters", 1000),
        ("sdp_hierarchical_allgather", False),
        ("sdp_gather", "step"),
        ("sdp_gradient_clipping", 1.0),
    ],
)
def test_an_option_of_sharding_without_sharding_is_refused(name, value, state):
    assert problems(**{name: value}, shard_optimizer_state=state) == [
        f"`{name}={value!r}` has no effect, because no parameters are sharded. Set `sharded_data_parallel_degree`, or "
        "leave it out."
    ]


def test_all_options_without_effect_are_named_together():
    [problem] = problems(sdp_gather="step", sdp_gradient_clipping=1.0)
    assert problem.startswith("`sdp_gather='step'` and `sdp_gradient_clipping=1.0` have no effect")
    assert problem.endswith("or leave them out.")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SMP_SHARDED_DATA_PARALLEL_DEGREE", "1", "sharded_data_parallel_degree", 1),
        ("SMP_SDP_GATHER", "auto", "sdp_gather", "auto"),
        ("SMP_SDP_GRADIENT_CLIPPING", "none", "sdp_gradient_clipping", None),
    ],
)
def test_a_variable_sets_the_option_of_its_name(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    assert getattr(SMPConfig.from_options(), name) == value


def test_sums_over_replicas_are_hierarchical_flat_or_what_fits():
    assert SMPConfig().ddp_reduction == "auto"
    assert problems(ddp_reduction="ring") == ["`ddp_reduction` must be one of auto, hierarchical, flat, but is 'ring'."]
    assert not problems(ddp_reduction="flat", shard_optimizer_state=True)
    assert not problems(**SHARDED, ddp_reduction="hierarchical", shard_optimizer_state=True)
    [problem] = problems(ddp_reduction="hierarchical", shard_optimizer_state=True)
    assert problem.startswith("`ddp_reduction=hierarchical` contradicts `shard_optimizer_state=True`")
