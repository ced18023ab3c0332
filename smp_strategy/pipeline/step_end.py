"""What the stages do together when their programs have ended, while backwards still run.

They make sure that they have run the same programs, without which the rest would not match, and then give each other
the values of what the programs have returned. Both travel in the background: nobody waits before the end of the step.
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
    """See the module docstring. Collective: all stages make one for each step, and finish it.

    Args:
        stage: where this happens.
        programs: which have all ended.
        results: a tree with the placed tensors that they have returned.
    """

    def __init__(self, stage: Stage, programs: Sequence[MicrobatchInterpreter], results: Any) -> None:
        self._stage = stage
        self._results = results
        self._sharing: Callable[[], Any] | None = None

        def path() -> list[str]:
            return [name for program in programs for name in program.record.path]

        digest = zlib.crc32("\n".join(path()).encode())
        self._agreement = None if stage.transport is None else begin_to_agree(stage.transport, digest, path)

    def go_on(self) -> None:
        """Begin what can begin by now; waits for no other stage."""
        # Ranks that split layers between them begin together: to share a result they put its parts together.
        if self._sharing is None and self._agreement is not None and self._stage.agree(self._agreement.is_reached()):
            self.agree()

    def agree(self) -> None:
        """Make sure that all stages have run the same programs."""
        if self._sharing is None:
            if self._agreement is not None:
                self._agreement.check()
            self._sharing = self._stage.begin_to_make_real(self._results)

    def finish(self) -> Any:
        """The results with real tensors."""
        self.agree()
        assert self._sharing is not None
        return self._sharing()
