"""What a memory budget costs: time and peak of training steps where the library chooses what units keep for backward.

A GPT of 8 blocks trains on the CPU, on one stage and on two, with everything kept, with every unit computed again, with
all but the products computed again, and with `activation_checkpointing=auto` under budgets between the first two. The
peak is that of live tensors during a step, beyond what is there between steps, on the fullest rank
(`live_bytes.py`); beside it stands what was predicted for activations. Working memory (gradients on their way through a
unit) is in the first and not in the second, so what counts is by how much a mode lowers either. Modes take turns, and
times are the fastest of all rounds::

    python benchmarks/activation_budget.py [--quick]

The last line is JSON: ``peak_over_predicted`` is the worst ratio of what was measured to be spared and what was
predicted to be spared, whichever is larger over the other; ``auto_over_all`` the step time under the tightest budget
that everything computed again would need, over the time of computing everything again; ``auto_over_none`` that of
the loosest budget over the time of keeping everything; ``within_budget`` whether the predicted peak of each choice was
within its budget.
"""

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from live_bytes import Baseline, peak_of
from timing import over_ranks, seconds_of
from torch import nn
from workloads import GPT, Batch, EngineSteps

from smp_strategy.config.config import SMPConfig
from smp_strategy.testing import run_ranks

NUM_MICROBATCHES = 4
WARM_UPS = 2
# Shares of the way from what everything computed again needs to what everything kept needs.
SHARES = (0.0, 0.25, 0.5, 0.75)


class Figures(NamedTuple):
    """Of one mode."""

    num_stages: int
    mode: str
    seconds: float
    spared: int
    """Of the measured peak on the fullest stage, against keeping everything."""
    predicted_spared: int
    peak: int
    predicted: int
    budget: int | None


class Mode(NamedTuple):
    """A way to train, warmed up."""

    name: str
    side: EngineSteps
    peak: int
    budget: int | None

    @property
    def memory(self) -> list[int]:
        """Bytes predicted for each stage."""
        partition = self.side.engine.partition
        assert partition is not None
        return [stage.memory_bytes for stage in partition.stages]

    @property
    def activations(self) -> int:
        """Bytes predicted for activations on the stage with most."""
        partition = self.side.engine.partition
        assert partition is not None
        return max(stage.activation_bytes + stage.working_bytes for stage in partition.stages)


def warmed_up(name: str, workload: GPT, model: nn.Module, batch: Batch, options: Mapping[str, object]) -> Mode:
    """After some steps, with the peak of live bytes in the last of them beyond those at rest."""
    model = copy.deepcopy(model)
    baseline = Baseline()
    config = SMPConfig.from_options(pipeline="1f1b", microbatches=NUM_MICROBATCHES, memory_weight=0.0, **options)
    side = EngineSteps(workload, model, torch.optim.SGD(model.parameters(), 1e-3), batch, config)
    for _ in range(WARM_UPS):
        side.step()
    at_rest = list({tensor.untyped_storage()._cdata: tensor for tensor in baseline.since()}.values())
    resting = sum(tensor.untyped_storage().nbytes() for tensor in at_rest)
    peak = peak_of(side.step, iter(at_rest)) - resting
    budget = options.get("memory_limit")
    return Mode(name, side, int(over_ranks(peak, dist.ReduceOp.MAX)), budget if isinstance(budget, int) else None)


def measured(quick: bool) -> list[Figures]:
    """All modes on as many stages as there are ranks."""
    torch.manual_seed(0)
    num_stages = dist.get_world_size()
    workload = GPT(256, separates_ends=True, length=128, width=192)
    if quick:
        workload = GPT(256, separates_ends=True, length=32, width=48, num_blocks=4)
    model, batch = workload.model(), workload.batch(NUM_MICROBATCHES)
    degree = {"pipeline_parallel_degree": num_stages}
    modes = [
        warmed_up("none", workload, model, batch, degree),
        warmed_up("all", workload, model, batch, {**degree, "activation_checkpointing": "all"}),
        warmed_up(
            "cheap",
            workload,
            model,
            batch,
            {**degree, "activation_checkpointing": "all", "selective_checkpointing": True},
        ),
    ]
    most, least = max(modes[0].memory), max(modes[1].memory)
    for share in (SHARES[0], SHARES[-1]) if quick else SHARES:
        options = {"activation_checkpointing": "auto", "memory_limit": round(least + share * (most - least))}
        modes.append(warmed_up(f"auto {share:.0%}", workload, model, batch, {**degree, **options}))
    check(modes)
    seconds = dict.fromkeys((mode.name for mode in modes), float("inf"))
    for _ in range(1 if quick else 12):
        for mode in modes:
            seconds[mode.name] = min(seconds[mode.name], seconds_of(mode.side.step))
    for mode in modes:
        mode.side.engine.close()
    first = modes[0]
    return [
        Figures(
            num_stages,
            mode.name,
            seconds[mode.name],
            first.peak - mode.peak,
            first.activations - mode.activations,
            mode.peak,
            mode.activations,
            None if mode.budget is None else mode.budget - max(mode.memory),
        )
        for mode in modes
    ]


def check(modes: Sequence[Mode]) -> None:
    """A benchmark of wrong numbers is worth nothing: after as many steps all have the same bits."""
    first, *others = [mode.side.engine.saved.full_state_dict() for mode in modes]  # on rank 0
    for mode, weights in zip(modes[1:], others, strict=True):
        for name, weight in weights.items():
            if not torch.equal(weight, first[name]):
                raise AssertionError(f"{mode.name} has other weights than {modes[0].name}.")


def main() -> None:
    """Run and print."""
    quick = "--quick" in sys.argv
    rows: list[Figures] = []
    for num_stages in (1, 2):
        rows += run_ranks(measured, num_stages, quick, timeout=300.0)[0]
    mib = 1 << 20
    print("| stages | mode | ms per step | peak MiB | predicted MiB | spared MiB | predicted MiB | below budget MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        below = "" if row.budget is None else f"{row.budget / mib:.2f}"
        print(
            f"| {row.num_stages} | {row.mode} | {1e3 * row.seconds:.1f} | {row.peak / mib:.2f} | "
            f"{row.predicted / mib:.2f} | {row.spared / mib:.2f} | {row.predicted_spared / mib:.2f} | {below} |"
        )
    spared = [(row.spared, row.predicted_spared) for row in rows if row.predicted_spared > 0]
    times = {(row.num_stages, row.mode): row.seconds for row in rows}
    print(
        json.dumps(
            {
                "peak_over_predicted": max(max(a / b, b / max(a, 1)) for a, b in spared),
                "auto_over_all": max(times[n, "auto 0%"] / times[n, "all"] for n in (1, 2)),
                "auto_over_none": max(times[n, "auto 75%"] / times[n, "none"] for n in (1, 2)),
                "within_budget": all(row.budget is None or row.budget >= 0 for row in rows),
            }
        )
    )


if __name__ == "__main__":
    main()
