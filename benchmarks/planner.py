"""Predictions of ``smp estimate`` beside steps on this machine and published runs, and the time of ``smp plan``::

    python benchmarks/planner.py            # some minutes on two idle cores
    python benchmarks/planner.py --quick    # tiny models, a step of each layout: does it run?

Two models train in 14 layouts each on one process and on two (``planned_steps.py``), which time-share nothing: a
process has a core of its own. Their device is measured at the start.

The published runs are those of a GPT-2 of 30 billion parameters with SageMaker's sharded data parallelism (MiCS), fp16,
activations computed again, on nodes of 8 A100 with 40 GB and 400 Gbit/s; the AWS blog post "Train gigantic models with
near-linear scaling using sharded data parallelism on Amazon SageMaker" (2022) gives their samples per second.

The last line is JSON: ``time_error`` and ``memory_error`` are means of |predicted / measured - 1| on this machine,
``kendall_tau`` is the agreement of the orders of layouts by predicted and by measured time, ``published_error`` the
mean of |predicted / published - 1|, ``plan_seconds_175b`` the CPU seconds of a search for a GPT of 175 billion
parameters on 512 A100.
"""

import json
import sys
import time
from statistics import mean

import torch
from planned_steps import compare, kendall_tau
from transformers import GPT2Config, GPT2LMHeadModel

from smp_strategy.engine.commands.layout_planning import LayoutPlanner
from smp_strategy.planning.layouts.cluster import Cluster, JobLayout

# Cluster, tokens of a sample, layout, published samples per second.
PUBLISHED = [
    ("16x8xa100-40gb", 512, JobLayout(1, 1, 64, 2, 1, 24, True), 181.05),
    ("32x8xa100-40gb", 2048, JobLayout(1, 1, 128, 2, 1, 6, True), 73.52),
]


def planner(cluster: str, sequence: int, *, width: int, blocks: int, heads: int) -> LayoutPlanner:
    """Planner of a GPT-2; attention has no dropout, which GPUs fuse and a CPU, whose kernels are counted, does not."""
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": heads, "n_positions": 2048, "attn_pdrop": 0.0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes))
    return LayoutPlanner(
        module=model,
        step=lambda ids: model(ids, labels=ids).loss,
        batch_of=lambda count: torch.zeros(count, sequence, dtype=torch.int64),
        cluster=Cluster.read(cluster),
        options={"fp16": True},
    )


def main() -> None:
    """Print the predictions, then the line of JSON."""
    torch.set_num_threads(1)  # also those of the processes to come
    is_quick = "--quick" in sys.argv[1:]
    rows = compare(is_quick)
    print("| model | layout | microbatches | ms | predicted | MiB | predicted |\n|---|---|---|---|---|---|---|")
    print("\n".join(row.row() for row in rows))
    errors = []
    for cluster, sequence, layout, published in PUBLISHED:
        plans = planner(cluster, sequence, width=7168, blocks=2 if is_quick else 48, heads=64)
        plan = plans.estimate(layout)
        (found,) = plan.estimates
        rate = found.samples_per_second
        errors.append(abs(rate / published - 1))
        print(
            f"{cluster}, {sequence} tokens, {layout}: {rate:.1f} samples/s predicted, {published:.1f} published, "
            f"MFU {plan.mfu(found):.3f}",
            flush=True,
        )
    begin = time.process_time()
    best = planner("512xa100", 2048, width=12288, blocks=2 if is_quick else 96, heads=96).search(1536).estimates[0]
    seconds = time.process_time() - begin
    print(f"175B on 512xa100: {best.layout}, {best.layout.microbatches} microbatches of {best.layout.samples}")
    figures = {
        "time_error": mean(abs(row.time_error) for row in rows),
        "memory_error": mean(abs(row.memory_error) for row in rows),
        "kendall_tau": kendall_tau(rows),
        "published_error": mean(errors),
        "plan_seconds_175b": seconds,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
