"""Commands ``smp plan`` and ``smp estimate``: the fastest layouts of a model on a cluster, or the figures of one."""

import json
from argparse import Namespace
from typing import Any

import yaml

from smp_strategy.config.recipe import parse_recipe
from smp_strategy.engine.layout_planning import LayoutPlanner
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.planning.models import load_model
from smp_strategy.planning.layouts.cluster import Cluster
from smp_strategy.planning.layouts.estimate import Estimate
from smp_strategy.planning.layouts.job_layout import JobLayout
from smp_strategy.planning.output_file import write_atomically
from smp_strategy.reports.layout_plan import layouts_text, plan_as_data, run_options

__all__ = ["run"]

PRECISIONS = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "float32": {}}


def run(given: Namespace) -> int:
    """Print the plan, write the files that are asked for; returns the exit status: 1 if nothing fits."""
    cluster = Cluster.read(given.cluster)
    model = load_model(given.model, given.sequence)
    planner = LayoutPlanner(
        module=model.module,
        step=model.step,
        batch_of=model.batch_of,
        cluster=cluster,
        options=PRECISIONS[given.precision],
        memory_limit=given.memory_limit,
    )
    if given.command == "plan":
        plan = planner.search(given.global_batch, finalists=given.show)
    else:
        plan = planner.estimate(_layout(given, cluster))
    best = plan.estimates[0]
    print(json.dumps(plan_as_data(plan), indent=2) if given.json else layouts_text(plan, sequence=model.sequence))
    if given.hydra is not None:
        write_atomically(given.hydra, _hydra(best, given))
    if given.accelerate is not None:
        write_atomically(given.accelerate, _accelerate(best, cluster, given))
    return 0 if best.fits else 1


def _layout(given: Namespace, cluster: Cluster) -> JobLayout:
    """JobLayout of a recipe such as ``pp4_tp2_sdp8_mb16``; the devices that are left over are replicas.

    Raises:
        ConfigError: The recipe is none, or does not fit the devices or the batch.
    """
    options = parse_recipe(given.layout)
    pp, tp, shards = (
        options.pop(f"{name}_degree", 1) for name in ("pipeline_parallel", "tensor_parallel", "sharded_data_parallel")
    )
    microbatches = options.pop("microbatches", 1)
    if options:
        raise ConfigError(f"`--layout {given.layout}`: an estimate has no `{next(iter(options))}`. Leave it out.")
    replicas, left = divmod(cluster.num_devices, pp * tp * shards)
    if left:
        raise ConfigError(
            f"`--layout {given.layout}` needs a multiple of {pp * tp * shards} devices, but the cluster has "
            f"{cluster.num_devices}."
        )
    samples, left = divmod(given.global_batch, replicas * shards * microbatches)
    if left or not samples:
        raise ConfigError(
            f"`--global-batch {given.global_batch}` must be a multiple of {replicas * shards * microbatches}: "
            f"{replicas * shards} replicas of {microbatches} microbatches."
        )
    return JobLayout(pp, tp, shards, replicas, microbatches, samples, given.recompute)


def _about(given: Namespace) -> str:
    return f"# smp {given.command} {given.model} --cluster {given.cluster} --global-batch {given.global_batch}\n"


def _hydra(best: Estimate, given: Namespace) -> str:
    options = {**run_options(best), **PRECISIONS[given.precision]}
    return _about(given) + yaml.safe_dump({"defaults": ["base", "_self_"], **options}, sort_keys=False)


def _accelerate(best: Estimate, cluster: Cluster, given: Namespace) -> str:
    """Configuration of `accelerate launch`, to be started on each node with its own rank."""
    on_cpu = cluster.name == "cpu"
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU" if on_cpu else "MULTI_GPU",
        "use_cpu": on_cpu,
        "num_machines": cluster.nodes,
        "num_processes": cluster.num_devices,
        "machine_rank": 0,
        "mixed_precision": "no" if given.precision == "float32" else given.precision,
        "smp_config": run_options(best),
    }
    return _about(given) + yaml.safe_dump(found, sort_keys=False)
