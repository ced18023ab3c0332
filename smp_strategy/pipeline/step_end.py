"""End of a step: compare the programs of all stages, then broadcast their results, while backwards still run.

The broadcast needs the comparison first, as the results of different programs would not match. Messages travel in the
background: no stage waits before the end of the step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import CALL_INPUTS, PROGRAM, UNIT_ARGUMENTS
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.stage import Stage

__all__ = ["THE_END", "StepEnd"]

THE_END: Final = "the end of a step or hook"
"""Purpose of the comparison, for messages."""


@final
class StepEnd:
    """Agreement on the programs of one step, which have all ended, and broadcast of their results; collective: all
    stages make one for each step, and finish it.
    """

    def __init__(self, stage: Stage, programs: Sequence[MicrobatchInterpreter], results: Any) -> None:
        self._stage = stage
        self._results = results
        self._sharing: Callable[[], Any] | None = None
        self._ledger = Ledger(probes=True)
        inputs, losses = stage.carried.take_inputs()
        if stage.note_inputs is not None:
            stage.note_inputs(inputs, losses)
        if stage.transport is not None:
            self._ledger.note(PROGRAM, "\n".join(name for each in programs for name in each.program_trace.path))
            self._ledger.note(UNIT_ARGUMENTS, stage.carried.take()).note(CALL_INPUTS, inputs)
            self._ledger.begin(THE_END, stage.transport.group)

    def go_on(self) -> None:
        """Begin whatever can begin now, without waiting for other stages."""
        # Tensor-parallel ranks begin together: broadcasting a result may gather its parts from them.
        if self._sharing is None and self._stage.transport is not None and self._stage.agree(self._ledger.is_alike()):
            self.agree()

    def agree(self) -> None:
        """Wait for the comparison, raise if the stages have run different programs, and begin the broadcast."""
        if self._sharing is None:
            self._ledger.check()
            self._sharing = self._stage.begin_to_make_real(self._results)

    def finish(self) -> Any:
        """Wait for the broadcast; returns the results with real tensors."""
        self.agree()
        assert self._sharing is not None
        return self._sharing()
