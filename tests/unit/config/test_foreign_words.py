"""Errors name our option or word for those of Megatron, DeepSpeed, torch, Accelerate and vLLM."""

import re
from collections import Counter

import pytest
import torch

from smp_strategy.config.config import SMPConfig, option_types
from smp_strategy.config.foreign_words import NAMES, NOTES, VALUES, meant_option, meant_value
from smp_strategy.config.parsing import fits, one_of
from smp_strategy.errors import ConfigError


def problem_of(**options):
    with pytest.raises(ConfigError) as caught:
        SMPConfig.from_options(**options)
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("pp", "pipeline_parallel_degree"),
        ("pipeline_model_parallel_size", "pipeline_parallel_degree"),  # Megatron
        ("pipeline-model-parallel-size", "pipeline_parallel_degree"),
        ("megatron_lm_pp_degree", "pipeline_parallel_degree"),  # Accelerate's file
        ("tensor_parallel_size", "tensor_parallel_degree"),  # vLLM, Lightning
        ("parallelism_config_tp_size", "tensor_parallel_degree"),
        ("data_parallel_shard_degree", "sharded_data_parallel_degree"),  # torchtitan
        ("mics_shard_size", "sharded_data_parallel_degree"),  # DeepSpeed
        ("n_microbatches", "microbatches"),  # torch
        ("gradient_checkpointing", "activation_checkpointing"),  # Transformers
        ("fsdp_activation_checkpointing", "activation_checkpointing"),
        ("fsdp_transformer_layer_cls_to_wrap", "unit_classes"),
        ("stage3_max_live_parameters", "sdp_max_live_parameters"),
        ("Microbatches", "microbatches"),
        ("stage-transport", "stage_transport"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(name, option):
    assert problem_of(**{name: 2}) == f"`{name}` is not an option. Write `{option}`."


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("zero_stage", "`shard_optimizer_state=True`"),
        ("dp_replicate_size", "Leave it out"),
        ("micro_batch_size", "a number, not a size"),
        ("cpu_offload", "`offload_activations=True`"),
        ("context_parallel_size", "no context parallelism"),
        ("fp8", "no fp8"),
        ("recompute_granularity", "`selective_checkpointing=True`"),
    ],
)
def test_where_no_option_stands_alone_the_error_says_what_to_do(name, told):
    assert told in problem_of(**{name: 2})


@pytest.mark.parametrize(
    ("option", "value", "ours"),
    [
        ("pipeline", "gpipe", "simple"),
        ("pipeline", "GPipe", "simple"),
        ("pipeline", "Schedule1F1B", "1f1b"),
        ("pipeline", "1F1B", "1f1b"),
        ("pipeline", "zbv", "zb-v"),
        ("pipeline", "ZBVZeroBubble", "zb-v"),
        ("activation_checkpointing", True, "all"),
        ("activation_checkpointing", "full", "all"),
        ("activation_checkpointing", "selective", "all` with `selective_checkpointing=True"),
        ("reduce_dtype", "fp32", "float32"),
        ("reduce_dtype", torch.bfloat16, "bfloat16"),
        ("state_dict_type", "SHARDED_STATE_DICT", "sharded"),
        ("sdp_gather", True, "use"),
    ],
)
def test_a_value_of_another_library_is_answered_with_our_word(option, value, ours):
    assert f"Write `{ours}`." in problem_of(**{option: value})


def test_a_value_that_nobody_has_gets_no_advice():
    assert problem_of(pipeline="sideways").endswith("but is 'sideways'.")


def test_words_lead_to_options_and_to_one_only():
    options = option_types()
    assert set(NAMES) | set(VALUES) <= set(options)
    words = [name for names in (*NAMES.values(), *NOTES) for name in names.split()]
    assert not [word for word, count in Counter(words).items() if count > 1]
    assert not set(words) & set(options)
    mentioned = [name for note in NOTES.values() for name in re.findall(r"`([a-z]\w+)=", note)]
    assert set(mentioned) - {"smp"} <= set(options)


@pytest.mark.parametrize("option", VALUES)
def test_advice_on_values_is_followed_without_another_error(option):
    hint = option_types()[option]
    for ours, words in VALUES[option].items():
        word = ours.partition("`")[0]
        assert fits(word, hint)
        assert not re.search("[^a-z0-9 ]", words)
        if option != "activation_checkpointing":
            SMPConfig(**{"sharded_data_parallel_degree": 2, "trace_memory_usage": True, option: word})


def test_the_nearest_name_still_answers_a_slip_of_the_pen():
    assert "Did you mean `microbatches`?" in problem_of(microbatchs=2)
    assert meant_option("microbatchs", option_types()) is None
    assert meant_value("pipeline", "1f1bb") is None
    assert one_of(SMPConfig(), "pipeline", ("interleaved",)) == []


@pytest.mark.parametrize(
    ("environment", "options", "told"),
    [
        ({}, {"partitions": 0}, "`pipeline_parallel_degree` comes from its alias `partitions`."),
        ({"SMP_MICROBATCHES": "0"}, {}, "`microbatches` comes from the environment variable SMP_MICROBATCHES."),
        (
            {"SMP_PARTITIONS": "0", "ACCELERATE_USE_SMP": "true"},
            {},
            "the environment variable SMP_PARTITIONS (`accelerate launch` sets it from `smp_config`).",
        ),
        ({"SMP_CONFIG": "pp2_simple"}, {"active_microbatches": 1}, "`pipeline` comes from SMP_CONFIG=pp2_simple."),
        ({}, {"default_partition": 0}, "`auto_partition=True` is its default."),
        ({"SMP_CONFIG": "pp0"}, {}, "`SMP_CONFIG=pp0`: pp0 must be pp1 or more"),
        ({"SMP_CONFIG": "pq"}, {}, "`SMP_CONFIG=pq`: the part 'pq'"),
        ({"SMP_PP": "2"}, {}, "Did you mean SMP_PIPELINE_PARALLEL_DEGREE?"),
    ],
)
def test_an_error_says_where_an_option_comes_from_that_the_user_has_not_written(
    environment, options, told, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert told in problem_of(**options)


def test_arguments_are_not_blamed_on_the_environment(monkeypatch):
    monkeypatch.setenv("SMP_MICROBATCHES", "4")
    assert problem_of(microbatches=0) == "`microbatches` must be at least 1, but is 0."
