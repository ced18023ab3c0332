"""A configuration of SageMaker's library as options."""

import copy
import functools
import json
import logging

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from smp_strategy import ConfigError, SMPConfig
from smp_strategy.config.sagemaker_options import V1, V2, read_sagemaker

ESTIMATOR = {
    "smdistributed": {
        "modelparallel": {
            "enabled": True,
            "parameters": {
                "partitions": 4,
                "microbatches": 8,
                "pipeline": "interleaved",
                "optimize": "speed",
                "placement_strategy": "spread",
                "ddp": True,
            },
        }
    },
    "mpi": {
        "enabled": True,
        "processes_per_host": 8,
        "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none",
    },
}


def test_the_distribution_of_an_estimator_is_read(caplog):
    with caplog.at_level(logging.INFO, "smp_strategy"):
        config = SMPConfig.from_sagemaker(ESTIMATOR)
    assert (config.pipeline_parallel_degree, config.microbatches, config.optimize) == (4, 8, "speed")
    assert config.placement_strategy == "spread"
    assert "`mpi` has no effect: the launcher starts the processes (`torchrun --nproc-per-node=8`)." in caplog.messages
    note = "`ddp` has no effect: replicas are averaged whenever there are several (`ddp_reduction` chooses how)."
    assert note in caplog.messages
    assert caplog.messages[-1].startswith("SageMaker's configuration maps to: pipeline_parallel_degree=4, microbatch")


def test_a_file_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"pipeline_parallel_degree": 2}))
    for given in (str(file), file, {"modelparallel": {"enabled": True, "parameters": str(file)}}):
        assert SMPConfig.from_sagemaker(given).pipeline_parallel_degree == 2
    with pytest.raises(ConfigError, match="cannot be read from .*nowhere.json"):
        SMPConfig.from_sagemaker(tmp_path / "nowhere.json")


def test_defaults_are_sagemakers():
    config = SMPConfig.from_sagemaker({})
    assert (config.pipeline_parallel_degree, config.microbatches, config.optimize) == (1, 1, "memory")
    assert config.resolved_memory_weight == 0.8
    assert config.sdp_gradient_clipping is None
    sharded = SMPConfig.from_sagemaker({"sharded_data_parallel_degree": 2, "ddp": True})
    assert (sharded.sdp_param_persistence_threshold, sharded.sdp_gradient_clipping) == (1_000_000, 1.0)
    own = SMPConfig.from_sagemaker({"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.5, "bf16": True})
    assert (own.sdp_gradient_clipping, own.bf16) == (0.5, True)
    split = SMPConfig.from_sagemaker({"tensor_parallel_degree": 2, "ddp": True})
    assert not split.prescaled_batch
    assert SMPConfig.from_sagemaker({"auto_partition": False, "partitions": 2}).default_partition == 0


def test_options_without_effect_are_left_out_with_a_note():
    given = {"sdp_reduce_bucket_size": 5, "prescaled_batch": True, "activation_loading_horizon": 2, "use_times": True}
    read = read_sagemaker(given)
    config = SMPConfig.from_sagemaker(given)
    assert config.activation_loading_horizon == 4
    assert config.trace_execution_times
    assert [note.split()[0] for note in read.notes] == [
        "`sdp_reduce_bucket_size`",
        "`prescaled_batch`",
        "`activation_loading_horizon`",
    ]


def test_variables_win(monkeypatch):
    monkeypatch.setenv("SMP_MICROBATCHES", "6")
    assert SMPConfig.from_sagemaker({"microbatches": 2}).microbatches == 6


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"microbatch": 2}, "`microbatch` is no key of `parameters`. Did you mean `microbatches`"),
        ({"ddp": True, "horovod": True}, "`ddp` and `horovod` are both True"),
        ({"ddp_port": 1}, "`ddp_port` needs `ddp`"),
        ({"ddp": True, "ddp_dist_backend": "gloo"}, "`ddp_dist_backend` must be auto or nccl, but is 'gloo'"),
        ({"ddp": False, "tensor_parallel_degree": 2}, r"`tensor_parallel_degree` \(2\) needs replicas"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "are the same, but they differ"),
        ({"pipeline": "_only_forward"}, "`pipeline` must be one of"),
        ({"partitions": 0}, "`partitions` must be a whole number from 1 on, but is 0"),
        ({"modelparallel": {"enabled": False}}, "`modelparallel` is not enabled"),
        ({"smdistributed": {"modelparallel": {"enabled": True}, "dataparallel": {"enabled": True}}}, "exclude each"),
        ({"hybrid_shard_degree": 2, "context_parallel_degree": 2}, "sequences are not split over ranks"),
        ({"hybrid_shard_degree": 2, "partitions": 2}, "`partitions` is no key"),
        ({"dataparallel": {"enabled": True, "bucket": 1}}, "`bucket` is no key of `dataparallel`"),
        (3, "must be a dict"),
        ({"smdistributed": None}, "`smdistributed` must be a dict, but is None"),
        ({"smdistributed": "x"}, "`smdistributed` must be a dict"),
        ({"smdistributed": {"modelparallel": "x"}}, "`modelparallel` must be a dict, but is 'x'"),
        ({"dataparallel": 1}, "`dataparallel` must be a dict"),
        ({**ESTIMATOR, "mpi": "x"}, "`mpi` must be a dict"),
        ({**ESTIMATOR, "mpi": {"processes_per_host": -1}}, "`processes_per_host` must be a whole number from 1"),
        ({**ESTIMATOR, "mpi": {"hosts": 2}}, "`hosts` is no key of `mpi`"),
        ({**ESTIMATOR, "modelparallel": {}}, "`modelparallel` is no key of `distribution`"),
        ({"modelparallel": {"enabled": "yes"}}, "`enabled` must be True or False, but is 'yes'"),
        ({"modelparallel": {"enabled": True, "parametres": {}}}, "Did you mean `parameters`"),
        ({"modelparallel": {"enabled": True, "parameters": None}}, "`parameters` must be a dict, but is None"),
        ({"modelparallel": {"enabled": True, "parameters": {"parameters": {}}}}, "`parameters` is no key"),
        ({1: 2}, "`1` is no key of `parameters`"),
        ({"hybrid_shard_degree": 0, "tensor_parallel_degree": "2"}, "`tensor_parallel_degree` must be a whole number"),
        ({"hybrid_shard_degree": 2, "activation_loading_horizon": 0}, "`activation_loading_horizon` must be a whole"),
        ({"microbatches": 0, "ddp": "yes"}, "(?s)`microbatches` must be .*`ddp` must be True or False, but is 'yes'"),
    ],
)
def test_mistakes_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        SMPConfig.from_sagemaker(given)


VALUES = [None, "x", "2", -1, 1.5, [], {}, float("nan"), 2**70]
TAKE_MORE = {"partition_file": (None, "x", "2"), "memory_weight": (None,), "sdp_gradient_clipping": (1.5, 2**70)}


@pytest.mark.parametrize("more", [{}, {"sharded_data_parallel_degree": 2}, {"tensor_parallel_degree": 2}])
def test_no_value_of_a_wrong_kind_gets_through(more):
    for keys, others in ((V1, {"ddp": True, **more}), (V2, {"hybrid_shard_degree": 2})):
        for name in keys:
            for value in VALUES:
                if value in TAKE_MORE.get(name, ()):
                    continue
                with pytest.raises(ConfigError, match=f"`{name}`"):
                    SMPConfig.from_sagemaker({**others, name: value})


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=2)
ODD = st.one_of(
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PLAIN, inner, max_size=2)),
    st.sampled_from([np.int64(2), np.float32(0.5), np.bool_(True), np.zeros(0), np.ones(2), np.array("x"), (), int]),
    st.sampled_from(["yes", "no", "2", "nan", ".", "auto", 1, 2, 8]),
)
NAMES = [(name, {"ddp": True}) for name in V1] + [(name, {"hybrid_shard_degree": 2}) for name in V2]
FORMS = {
    "parameters": lambda given: (given, None),
    "launcher": lambda given: ({"microbatches": 1} if "ddp" in given else None, given),
    "library": lambda given: ({"modelparallel": {"enabled": True, "parameters": given}}, None),
    "estimator": lambda given: (
        {"smdistributed": {"modelparallel": {"enabled": 1, "parameters": given}}, "mpi": {"enabled": True}},
        None,
    ),
}


@settings(max_examples=500, deadline=None)
@drawn(st.sampled_from(NAMES), ODD, st.sampled_from(sorted(FORMS)))
def test_any_value_of_a_parameter_gives_a_config_or_an_error_that_names_it(key, value, form):
    name, others = key
    given, launched = FORMS[form]({**others, name: value})
    try:
        read = read_sagemaker(given, launched=launched)
        SMPConfig.from_sagemaker_options(read.options)
    except ConfigError as error:
        assert f"`{name}`" in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert name in {**read.parameters, "partitions": 1}


PLACES = [
    *(("smdistributed",), ("mpi",), ("torch_distributed",), ("mpi", "processes_per_host"), ("mpi", "enabled")),
    *(("smdistributed", "modelparallel"), ("smdistributed", "dataparallel"), ("mpi", "custom_mpi_options")),
    *(("smdistributed", "modelparallel", "enabled"), ("smdistributed", "modelparallel", "parameters")),
]


@settings(max_examples=300, deadline=None)
@drawn(st.sampled_from(PLACES), ODD)
def test_any_value_in_a_distribution_gives_a_config_or_an_error_that_names_its_place(place, value):
    given = copy.deepcopy(ESTIMATOR)
    functools.reduce(lambda level, name: level[name], place[:-1], given)[place[-1]] = value
    try:
        read = SMPConfig.from_sagemaker(given)
    except ConfigError as error:
        names = (place[-1], "`modelparallel` is not enabled") if isinstance(value, dict) else place[-1:]
        assert any(name in str(error) for name in names)  # noqa: PT017  # either outcome is right
    else:
        assert read.pipeline_parallel_degree in (1, 4)


def test_flags_of_hyperparameters_may_be_numbers():
    config = SMPConfig.from_sagemaker({"shard_optimizer_state": 1, "skip_tracing": 0})
    assert config.shard_optimizer_state is True
    assert config.skip_tracing is False


def test_the_default_partition_has_no_effect_beside_an_automatic_one():
    for more in ({"auto_partition": True}, {}):
        read = read_sagemaker({"partitions": 2, "default_partition": 0, **more})
        assert "default_partition" not in read.options
        assert not any("default_partition" in note for note in read.notes)
    assert any("`default_partition`" in note for note in read_sagemaker({"default_partition": 1}).notes)


def test_a_limit_of_gathered_parameters_holds():
    given = {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_max_live_parameters": 1000}
    config = SMPConfig.from_sagemaker(given)
    assert (config.sdp_max_live_parameters, config.sdp_gather) == (1000, "use")


def test_a_strange_number_of_ranks_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ConfigError, match="WORLD_SIZE must be the number of ranks, but is 'abc'"):
        SMPConfig.from_sagemaker({"hybrid_shard_degree": 0})


def test_version_2_is_read(monkeypatch):
    config = SMPConfig.from_sagemaker({"hybrid_shard_degree": 4, "tensor_parallel_degree": 2, "random_seed": 1})
    assert (config.pipeline_parallel_degree, config.sharded_data_parallel_degree) == (1, 4)
    assert config.tensor_parallel_degree == 2
    assert config.prescaled_batch
    given = {"hybrid_shard_degree": 0, "tensor_parallel_degree": 2, "sm_activation_offloading": True}
    assert SMPConfig.from_sagemaker(given, world_size=16).sharded_data_parallel_degree == 8
    assert SMPConfig.from_sagemaker(given, world_size=16).offload_activations
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="whose number is not known here"):
        SMPConfig.from_sagemaker(given)


@pytest.mark.parametrize("options", [{}, {"custom_mpi_options": "-verbose"}])
def test_the_data_parallel_library_means_replicas_only(options):
    read = read_sagemaker({"smdistributed": {"dataparallel": {"enabled": True, **options}}})
    config = SMPConfig.from_sagemaker({"dataparallel": {"enabled": True, **options}})
    assert (config.pipeline_parallel_degree, config.ddp_reduction) == (1, "auto")
    assert any("custom_mpi_options" in note for note in read.notes) == bool(options)
