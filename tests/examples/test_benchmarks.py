"""The scripts in benchmarks/ run and end with one line of JSON; what they measure is not asserted."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).parents[2]
# Where there is no accelerator.
TINY = ["--device", "cpu", "--tiny"]
# Small runs: a few rounds, a few architectures.
SCRIPTS = {
    "activation_budget.py": (
        ["--quick"],
        {"peak_over_predicted", "auto_over_all", "auto_over_none", "within_budget"},
    ),
    "architectures.py": (["GPT2LMHeadModel"], {"architectures", "right", "bit_identical", "families"}),
    "planner.py": (
        ["--quick"],
        {"time_error", "memory_error", "kendall_tau", "published_error", "plan_seconds_175b"},
    ),
    "partition.py": (
        ["vit", "2"],
        {"never_worse", "mean_gain_vs_tree", "mean_gain_vs_equal", "max_gap", "default_slower", "default_saves"},
    ),
    "checkpoint.py": (
        ["--quick"],
        {"async_stall_vs_memcpy", "async_stall_vs_dcp", "save_vs_raw_write", "load_vs_raw_read"},
    ),
    "data_parallel.py": (
        ["--quick"],
        {"world1_overhead", "dp_vs_ddp", "state_vs_zero", "state_share", "state_share_zero"},
    ),
    "delayed.py": (["GPT2LMHeadModel", "LlamaForCausalLM"], {"models", "filled", "refused", "differs"}),
    "faults.py": (["kill-1", "--door", "lightning", "--layout", "pp2"], {"runs", "right", "lines", "seconds"}),
    "gpu/activations.py": (TINY, {"gone", "kept", "slower", "overlap", "targets"}),
    "gpu/correctness.py": (TINY, {"cases", "exact", "within", "worst"}),
    "gpu/half_precision.py": (TINY, {"fp16_over_bf16", "fp16_over_fp32", "skipped"}),
    "gpu/sharded_30b.py": (TINY, {"ours_gib", "fsdp2_gib", "ours_over_fsdp2"}),
    "gpu/stage_messages.py": (TINY, {"wrong", "refused", "ipc_over_copies", "ipc_over_host", "ipc_over_one_process"}),
    "gpu/training_step.py": (TINY, {"tokens_per_second", "mfu", "worst_over_plain"}),
    "glue.py": (["2"], {"glue_ms_48_blocks", "model_code_ms", "us_per_call", "calls"}),
    "measured_step.py": (["--quick"], {"measured_over_predicted"}),
    "messages.py": (
        ["--quick"],
        {
            "shm_over_gloo_bandwidth",
            "shm_over_copies",
            "shm_over_gloo_latency",
            "shm_over_gloo_cpu",
            "shm_over_gloo_step",
        },
    ),
    "pipeline.py": (
        ["--quick"],
        {"worst_ratio_vs_torch", "auto_ratio_vs_torch_1f1b", "sleep_efficiency", "worst_over_optimum"},
    ),
    "pretrained.py": (
        ["--quick"],
        {"peak_over_share", "load_over_plain", "save_over_plain", "startup_over_plain"},
    ),
    "pretrained_architectures.py": (["GPT2LMHeadModel"], {"models", "equal", "read_early", "refused", "failed"}),
    "schedule_search.py": (["--quick"], {"loop", "2x8_trace", "2x8_1f1b", "2x8_auto"}),
    "sharding.py": (
        ["--quick"],
        {"world1_overhead", "one_node_time_vs_fsdp2", "one_node_memory_vs_fsdp2"},
    ),
    "split_backward.py": (["2"], {"ratio_to_whole", "input_ms", "weight_ms", "whole_ms"}),
    "start.py": (
        ["--quick"],
        {"start_over_ddp", "cpu_over_ddp", "script_over_ddp", "import_over_lightning", "first_step_cpu"},
    ),
    "startup_at_scale.py": (["--quick"], {"8", "64", "512", "growth"}),
    "tensor_parallel.py": (
        ["--quick"],
        {"worst_time_vs_dtensor", "memory_vs_dtensor", "bytes_over_minimum", "tokens_bytes_over_minimum"},
    ),
    "training_memory.py": (
        ["--quick", "fp32"],
        {"pp2", "pp4", "sdp2", "sdp4", "predicted_pp2", "predicted_sdp4"},
    ),
    "varying_lengths.py": (
        ["--quick"],
        {"new_over_known", "evaluation_new_over_known", "varying_over_fixed", "varying_over_plain"},
    ),
}


@pytest.mark.one_in(len(SCRIPTS))
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_ends_with_its_figures(script, tmp_path):
    arguments, names = SCRIPTS[script]
    told = run_script(tmp_path, ROOT / "benchmarks" / script, *arguments)
    figures = json.loads(told.splitlines()[-1])
    assert names <= figures.keys()


def test_all_parts_for_an_accelerator_run_though_one_fails(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase $1 in *activations*) exit 3;; esac\necho "$@"\necho \'{"figure": 1}\'\n')
    python.chmod(0o755)
    told = subprocess.run(
        [ROOT / "benchmarks" / "gpu" / "all.sh", *TINY],
        env={**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    parts = [json.loads(line) for line in told[told.index("== all") + 1 :]]
    summary = parts.pop()
    assert [part["figures"] for part in parts] == [{"figure": 1}, {"figure": 1}, {"figure": 1}, None, {"figure": 1}]
    assert [part["status"] for part in parts] == [0, 0, 0, 3, 0]
    assert summary["parts"] == 5
    assert summary["ended"] == 4
    assert "--device cpu --tiny" in (tmp_path / "out" / "correctness.log").read_text()
