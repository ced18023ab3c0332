"""How long does it take to plan a long pipeline: to trace the model, to cut it, and to find its schedule?

GPT-2 of width 7168, on the meta device, under `pipeline=1f1b` and `pipeline=auto`::

    python benchmarks/schedule_search.py            # 48 blocks, 16 stages, 64 microbatches; 96 blocks, 48 stages, 512
    python benchmarks/schedule_search.py --quick    # 4 blocks on 2 stages: does it run?

The last line is JSON with CPU seconds: those of the trace, of partition and schedule, and ``loop``, those of a loop of
ten million additions, which take 0.6 s on an ordinary machine.
"""

import json
import sys
import time
from dataclasses import replace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.commands.offline_planning import trace_program
from smp_strategy.engine.plan_cache import policy_of
from smp_strategy.planning.planner import PlanningInput, best_partition, policies_of
from smp_strategy.planning.schedule.check_plan import check
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.search import search
from smp_strategy.planning.schedule.simulate import simulate

# Blocks, stages, microbatches.
JOBS = [(48, 16, 64), (96, 48, 512)]


def program_of(config: SMPConfig, blocks: int, num_stages: int) -> PlanningInput:
    """A microbatch of one sample, priced."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=7168, n_layer=blocks, n_head=64, n_positions=2048))
    ids = torch.zeros(1, 2048, dtype=torch.int64)
    return trace_program(
        config, model, lambda ids: model(ids, labels=ids).loss, ids, num_stages=num_stages, machine="cuda"
    )


def planned(config: SMPConfig, program: PlanningInput, num_stages: int) -> float:
    """Cut and schedule; returns the seconds of a step."""
    partition = best_partition(config, program, num_stages)
    flow = route(program.trace, partition.stage_of, num_stages, program.work)
    count, policy = config.num_microbatches(num_stages), policy_of(partition)
    if config.pipeline == "auto":
        policies = policies_of(config, num_stages, len(partition.units))
        plan = search(flow, count, [each for each in policies if each.layout == policy.layout], program.link).plan
    else:
        plan = simulate(flow, count, policy, program.link, thorough=True)
    check(plan, flow, count)
    return plan.makespan


def main() -> None:
    """Print the times, then the line of JSON."""
    begin = time.process_time()
    total = 0
    for number in range(10**7):
        total += number
    figures = {"loop": time.process_time() - begin}
    for blocks, num_stages, count in [(4, 2, 8)] if "--quick" in sys.argv[1:] else JOBS:
        config = SMPConfig(pipeline_parallel_degree=num_stages, microbatches=count)
        begin = time.process_time()
        program = program_of(config, blocks, num_stages)
        name = f"{num_stages}x{count}"
        figures[f"{name}_trace"] = time.process_time() - begin
        for pipeline in ("1f1b", "auto"):
            begin = time.process_time()
            seconds = planned(replace(config, pipeline=pipeline), program, num_stages)
            figures[f"{name}_{pipeline}"] = time.process_time() - begin
            print(f"{name}, {pipeline}: a step takes {seconds:.3f} s, found in {figures[f'{name}_{pipeline}']:.1f} s")
    print(json.dumps({name: round(seconds, 2) for name, seconds in figures.items()}))


if __name__ == "__main__":
    main()
