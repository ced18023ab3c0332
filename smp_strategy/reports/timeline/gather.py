"""From what each stage has recorded to the timeline of all stages, on every rank of the replica."""

from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.errors import SMPError
from smp_strategy.pipeline.recording import Recorded, Recording
from smp_strategy.pipeline.transport import Transport
from smp_strategy.reports.timeline.clocks import aligned, offsets
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["gather"]


def gather(recorded: Recorded | None, mesh: ProcessMesh, timeout: timedelta | None = None) -> Timeline:
    """The timeline of a step; collective over the replica.

    Args:
        recorded: what this rank knows of the step.
        mesh: where the ranks stand.
        timeout: longest wait for another rank; ``None``: that of the backend.

    Raises:
        SMPError: no step was recorded.
    """
    if recorded is None:
        raise SMPError(
            "There is no timeline yet: no training step has run after a timetable. The second one does, and the first "
            "if no validation comes before it and `skip_tracing` is off; under manual optimization none does. Ask "
            "after it."
        )
    known: Sequence[float] = [0.0]
    recordings: Sequence[Recording] = [recorded.recording]
    if mesh.pp > 1:
        # Connections of their own: those of the steps end with the run, and this may be asked after it.
        with closing(Transport(mesh.stage_ranks, mesh.pp_group, timeout)) as transport:
            found = offsets(transport, mesh.stage, mesh.pp)
        mine = mesh.stage, recorded.recording, found
        told = collectives.gather_objects(mine, "a call of `timeline()`", mesh.pp_group)
        _, recordings, (known, *_) = zip(*sorted(told, key=lambda each: each[0]), strict=True)
    return Timeline(
        plan=recorded.plan,
        stages=aligned(recordings, known),
        ranks=mesh.stage_ranks,
        step=recorded.number,
        rank=mesh.rank,
    )
