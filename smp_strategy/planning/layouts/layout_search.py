"""Search of the fastest layouts: a rough estimate of all, and the planner's for the best of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from smp_strategy.errors import ConfigError
from smp_strategy.planning.layouts.cluster import Cluster
from smp_strategy.planning.layouts.estimate import Estimate, LayoutCosts, planned, rough
from smp_strategy.planning.layouts.job_layout import JobLayout

__all__ = ["LayoutPlan", "fastest_layouts", "why_slower"]

# Rough estimates know nothing of uneven units, and are mostly less than this factor off.
LIKELY_ERROR = 1.3


@final
@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """The fastest layouts of a model on a cluster."""

    estimates: Sequence[Estimate]
    """The best one first."""
    cluster: Cluster
    num_parameters: int
    flops_per_sample: float
    """Floating-point operations of forward and backward, without recomputation."""

    def mfu(self, estimate: Estimate) -> float:
        """Model FLOPs utilization (PaLM, arXiv:2204.02311): FLOP/s of the model over the peak of all devices."""
        peak = self.cluster.device.peak_flops * estimate.layout.world_size
        return self.flops_per_sample * estimate.samples_per_second / peak


def fastest_layouts(
    layouts: Iterable[JobLayout],
    costs_of: Callable[[JobLayout], LayoutCosts],
    cluster: Cluster,
    memory_limit: int,
    *,
    finalists: int = 8,
) -> list[Estimate]:
    """The fastest layouts that fit, the best one first.

    Args:
        layouts: Layouts to choose from.
        costs_of: Costs of the model under a layout.
        cluster: Devices and links.
        memory_limit: Bytes of a rank.
        finalists: Number of layouts that are planned in full.

    Returns:
        At most ``finalists`` estimates. If nothing fits: one, that of the layout that needs least memory.
    """
    found = [rough(costs_of(layout), layout, cluster, memory_limit) for layout in layouts]
    if not found:
        raise ConfigError(
            "No layout fills the devices with equal microbatches. Take a global batch with more divisors."
        )
    # Recomputation of what fits without it only costs time; the planner decides about what fits barely.
    found.sort(key=lambda estimate: (estimate.seconds.total, estimate.memory.total))
    likely = [estimate for estimate in found if estimate.fits]
    best: list[Estimate] = []
    for estimate in likely:
        if len(best) == finalists or (best and estimate.seconds.total > LIKELY_ERROR * best[0].seconds.total):
            break
        try:
            best.append(planned(costs_of(estimate.layout), estimate.layout, cluster, memory_limit))
        except ConfigError:  # its fullest stage does not fit
            continue
        best.sort(key=lambda each: each.seconds.total)
    return best or [min(found, key=lambda estimate: estimate.memory.total)]


def why_slower(one: Estimate, best: Estimate) -> str:
    """The category in which ``one`` loses most against ``best``, in words; empty if it is not slower."""
    names = {
        "computation": "smaller or less even pieces of work",
        "recomputation": "computes activations again",
        "split_layers": "messages of split layers",
        "idle": "stages wait for each other",
        "gathers": "gathers of parameters",
        "gradients": "sums of gradients",
        "optimizer": "optimizer with less sharing",
    }
    more = {name: mine - theirs for name, mine, theirs in zip(names, one.seconds, best.seconds, strict=True)}
    most = max(more, key=lambda name: more[name])
    if one.seconds.total <= best.seconds.total or more[most] <= 0:
        return ""
    return f"{names[most]} (+{100 * more[most] / best.seconds.total:.0f} %)"
