"""End of a step: compare the programs of all stages, then broadcast their results, while backwards still run.

The broadcast needs the comparison first, as the results of different programs would not match. Messages travel in the
background: no stage waits before the end of the step.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, final

from smp_strategy.pipeline.agreement import begin_to_agree
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.stage import Stage

__all__ = ["StepEnd"]


@final
class StepEnd:
    """Agreement and broadcast at the end of one step; collective: all stages make one for each step, and finish it.

    Args:
        stage: this rank's stage.
        programs: programs of the step, which have all ended.
        results: tree of their return values, with placed tensors.
    """

    def __init__(self, stage: Stage, programs: Sequence[MicrobatchInterpreter], results: Any) -> None:
        self._stage = stage
        self._results = results
        self._sharing: Callable[[], Any] | None = None

        def path() -> list[str]:
            return [name for program in programs for name in program.program_trace.path]

        digest = zlib.crc32("\n".join(path()).encode())
        self._agreement = None if stage.transport is None else begin_to_agree(stage.transport, digest, path)

    def go_on(self) -> None:
        """Begin whatever can begin now, without waiting for other stages."""
        # Tensor-parallel ranks begin together: broadcasting a result may gather its parts from them.
        if self._sharing is None and self._agreement is not None and self._stage.agree(self._agreement.is_reached()):
            self.agree()

    def agree(self) -> None:
        """Wait for the comparison, raise if the stages have run different programs, and begin the broadcast."""
        if self._sharing is None:
            if self._agreement is not None:
                self._agreement.check()
            self._sharing = self._stage.begin_to_make_real(self._results)

    def finish(self) -> Any:
        """Wait for the broadcast; returns the results with real tensors."""
        self.agree()
        assert self._sharing is not None
        return self._sharing()
