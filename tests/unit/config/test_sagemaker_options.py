"""A configuration of SageMaker's library as options."""

import json
import logging

import pytest

from smp_strategy import ConfigError, SMPConfig
from smp_strategy.config.sagemaker_options import read_sagemaker

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
        ({"microbatch": 2}, "`microbatch` is no parameter of SageMaker's .* Did you mean `microbatches`"),
        ({"ddp": True, "horovod": True}, "`ddp` and `horovod` are both True"),
        ({"ddp_port": 1}, "`ddp_port` needs `ddp`"),
        ({"ddp": True, "ddp_dist_backend": "gloo"}, "`ddp_dist_backend` must be auto or nccl"),
        ({"ddp": False, "tensor_parallel_degree": 2}, r"`tensor_parallel_degree` \(2\) needs replicas"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "are the same, but they differ"),
        ({"pipeline": "_only_forward"}, "`pipeline` must be one of"),
        ({"partitions": 0}, "`pipeline_parallel_degree` must be at least 1"),
        ({"modelparallel": {"enabled": False}}, "`modelparallel` is not enabled"),
        ({"smdistributed": {"modelparallel": {"enabled": True}, "dataparallel": {"enabled": True}}}, "exclude each"),
        ({"hybrid_shard_degree": 2, "context_parallel_degree": 2}, "sequences are not split over ranks"),
        ({"hybrid_shard_degree": 2, "partitions": 2}, "`pipeline_parallel_degree` is no parameter"),
        ({"dataparallel": {"enabled": True, "bucket": 1}}, "`dataparallel` has `bucket`"),
        (3, "must be a dict"),
    ],
)
def test_mistakes_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        SMPConfig.from_sagemaker(given)


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
