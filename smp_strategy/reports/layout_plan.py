"""Report of a plan: the fastest layouts of a model on a cluster, and the step and memory of the best one, as text."""

from collections.abc import Sequence

from smp_strategy.config.sizes import show_bytes, show_count, show_seconds
from smp_strategy.planning.layouts.estimate import LIKELY_ERROR, Estimate, LayoutPlan, why_slower
from smp_strategy.reports.table import ReportTable, render_text

__all__ = ["chosen_text", "layouts_text", "plan_as_data", "run_options"]

_NAMES = {
    "split_layers": "messages of split layers",
    "gathers": "gathers of parameters",
    "gradients": "sums of gradients",
}


def layouts_text(plan: LayoutPlan, *, sequence: int | None = None) -> str:
    """Text for a terminal.

    Args:
        plan: Result of a search.
        sequence: Tokens of a sample, for tokens per second; ``None``: samples per second.
    """
    best, cluster = plan.estimates[0], plan.cluster
    nodes = show_count(cluster.nodes, "node")
    head = (
        f"{plan.num_parameters / 1e9:.3g} billion parameters on {nodes} of {cluster.devices_per_node} {cluster.name}, "
        f"{best.layout.global_batch} samples a step. All figures are predictions."
    )
    parts: list[str | ReportTable] = [head, _layouts(plan, sequence)]
    if not best.fits:
        parts.append(
            f"Nothing fits: even this layout needs {show_bytes(best.memory.total)} of {show_bytes(best.memory_limit)} "
            "on the fullest rank. Take more or larger devices, a smaller batch, or offload activations."
        )
    return render_text([*parts, _seconds(best), _memory(best), _links(best)])


def _layouts(plan: LayoutPlan, sequence: int | None) -> ReportTable:
    best = plan.estimates[0]
    rows = []
    for estimate in plan.estimates:
        layout, rate = estimate.layout, estimate.samples_per_second * (sequence or 1)
        schedule = "" if estimate.partition is None or layout.pp == 1 else estimate.partition.schedule
        if schedule and estimate.partition is not None and estimate.partition.chunks_per_stage > 1:
            schedule += f" v{estimate.partition.chunks_per_stage}"
        rows.append(
            (
                str(layout),
                schedule,
                f"{layout.microbatches} x {layout.samples}",
                "yes" if layout.recomputes else "no",
                show_seconds(estimate.seconds.total),
                f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
                f"{100 * plan.mfu(estimate):.1f} %",
                show_bytes(estimate.memory.total),
                why_slower(estimate, best),
            )
        )
    unit = "tokens/s" if sequence else "samples/s"
    columns = ("layout", "schedule", "microbatches", "recomputes", "step", unit, "MFU", "memory", "slower by")
    return ReportTable(columns=columns, rows=rows)


def _seconds(best: Estimate) -> ReportTable:
    total = best.seconds.total
    rows = [
        (_NAMES.get(name, name), show_seconds(seconds), f"{100 * seconds / total:.1f} %")
        for name, seconds in best.seconds._asdict().items()
        if seconds > 1e-6 * total
    ]
    return ReportTable(title=f"Step of {best.layout}", columns=("category", "time", "share"), rows=rows, num_left=1)


def _memory(best: Estimate) -> ReportTable:
    rows = [(name, show_bytes(nbytes)) for name, nbytes in best.memory._asdict().items() if nbytes]
    rows.append(("all", f"{show_bytes(best.memory.total)} of {show_bytes(best.memory_limit)}"))
    return ReportTable(
        title="Memory of the fullest rank", columns=("category", "bytes"), rows=rows, num_left=1, has_total=True
    )


def _links(best: Estimate) -> str | ReportTable:
    if not best.link_bytes:
        return "Ranks send nothing but activations between stages." if best.layout.pp > 1 else ""
    rows = [(purpose, show_bytes(nbytes)) for purpose, nbytes in best.link_bytes.items()]
    return ReportTable(title="Sent by a rank in a step", columns=("for", "bytes"), rows=rows, num_left=1)


def plan_as_data(plan: LayoutPlan) -> list[dict[str, object]]:
    """The layouts with their figures, as plain data: seconds, bytes, options of a run."""
    return [
        {
            "layout": estimate.layout._asdict(),
            "options": run_options(estimate),
            "fits": estimate.fits,
            "mfu": plan.mfu(estimate),
            "samples_per_second": estimate.samples_per_second,
            "step_seconds": estimate.seconds.total,
            "seconds": estimate.seconds._asdict(),
            "memory": estimate.memory._asdict(),
            "sent": dict(estimate.link_bytes),
        }
        for estimate in plan.estimates
    ]


def chosen_text(now: Estimate, others: Sequence[Estimate]) -> str:
    """Why ranks are stages where no degrees are given, as sentences.

    Args:
        now: Estimate of the layout of the run.
        others: Those with fewer stages and more replicas.
    """
    layout = now.layout
    said = (
        f"Why {layout.pp} stages: they work on one batch, as one process does. Estimated for "
        f"{show_count(layout.global_batch, 'sample')}: {_about(now)}."
    )
    whole = [each for each in others if each.layout.pp == each.layout.dp_shard == 1 and not each.fits]
    if whole:
        needed, limit = whole[0].memory.total, now.memory_limit
        said += f" A rank that held the whole model would need {show_bytes(needed)} of {show_bytes(limit)}."
    best = min((each for each in others if each.fits), key=lambda each: each.seconds.total, default=None)
    if best is None:
        return said
    if now.seconds.total < LIKELY_ERROR * best.seconds.total:
        return f"{said} Replicas, each with samples of its own, would hardly be faster."
    degrees = {name: value for name, value in best.layout.options.items() if name.endswith("degree")}
    options = ", ".join(f"{name}={value}" for name, value in degrees.items())
    return (
        f"{said} Faster for the same samples: {show_count(best.layout.dp, 'replica')} with batches of "
        f"{show_count(best.layout.microbatches * best.layout.samples, 'sample')} each (`{options}`), {_about(best)}."
    )


def _about(estimate: Estimate) -> str:
    return f"about {show_seconds(estimate.seconds.total)}, {show_bytes(estimate.memory.total)} on a rank"


def run_options(estimate: Estimate) -> dict[str, object]:
    """Options of a run with this layout and its schedule."""
    found = estimate.layout.options
    partition = estimate.partition
    if partition is not None and estimate.layout.pp > 1:
        found["pipeline"] = partition.schedule
        if partition.chunks_per_stage > 1:
            found["virtual_pipeline_degree"] = partition.chunks_per_stage
    return found
