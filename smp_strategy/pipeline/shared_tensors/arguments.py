"""Preparation of call arguments: placed tensors of this program, and metadata for the prediction."""

import operator
import weakref
from typing import Any, NoReturn, final

from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes, left_behind
from smp_strategy.model.trace.fake_call import is_left_behind
from smp_strategy.model.trace.side_effects import containers_of_objects
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor
from smp_strategy.pipeline.program_trace import ProgramTrace
from smp_strategy.pipeline.shared_tensors.aliasing import follow_changes
from smp_strategy.pipeline.shared_tensors.kept_tensors import AdoptedTensors

__all__ = ["CallArguments", "refuse_hidden", "refuse_transform"]


@final
class CallArguments:
    """Prepares the arguments of the calls of one program; ``exposed`` attributes are known in a dry run."""

    def __init__(
        self, interpreter: Interpreter, program_trace: ProgramTrace, stage: int, exposed: ExposedAttributes | None
    ) -> None:
        self._interpreter = interpreter
        self._program_trace = program_trace
        self._stage = stage
        self._exposed = exposed
        self._adopted = AdoptedTensors()
        # Containers lent to dry units, with their contents before.
        self._lent: list[Snapshot] = []
        self._specs: dict[int, tuple[weakref.ref[Tensor], TensorSpec]] = {}

    def open(self, leaves: list[Any]) -> tuple[list[PlacedTensor], list[Any]]:
        """Prepare ``leaves`` in place: tensors of ended programs are replaced. Returns the placed tensors among them,
        and all leaves with metadata instead of tensors.
        """
        placed, specs = [], []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, PlacedTensor):
                if leaf.program is not self._interpreter:
                    known = leaf.known
                    leaf = leaves[position] = self._adopted.adopted(leaf, self._interpreter) if known is None else known
                if isinstance(leaf, PlacedTensor):
                    if leaf.version != leaf.memory.version:
                        follow_changes(leaf, self._program_trace, self._stage)
                    placed.append(leaf)
                    specs.append(leaf.spec)
                    continue
            if isinstance(leaf, slice):
                leaf = leaves[position] = slice(*map(_number_of, (leaf.start, leaf.stop, leaf.step)))
            if not isinstance(leaf, Tensor):
                specs.append(leaf)
            elif is_left_behind(leaf):
                leaf = leaves[position] = self._instead_of_mark(leaf)
                placed.append(leaf)
                specs.append(leaf.spec)
            else:
                specs.append(self._spec_of(leaf))
        return placed, specs

    def lend(self, leaves: list[Any]) -> None:
        """Remember containers in objects of the user: a dry unit on fake tensors may fill them (a cache, say)."""
        self._lent.append(Snapshot(containers=containers_of_objects(leaves)))

    def clear(self) -> None:
        """Release adopted tensors, and empty lent containers again, at the end of the program."""
        self._adopted.clear()
        for contents in reversed(self._lent):
            contents.restore()
        self._lent.clear()

    def _spec_of(self, tensor: Tensor) -> TensorSpec:
        # Remembered, since a mask or a rotary table goes to every block.
        known = self._specs.get(id(tensor))
        same = known is not None and known[0]() is tensor and known[1].size == tensor.shape
        if known is None or not same or known[1].requires_grad != tensor.requires_grad:
            known = self._specs[id(tensor)] = (weakref.ref(tensor), TensorSpec.of(tensor))
        return known[1]

    def _instead_of_mark(self, mark: Tensor) -> PlacedTensor:
        """Placed tensor for one that a unit has set as an attribute; the survey is repeated with it exposed."""
        if self._exposed is None or not self._exposed.has_news:
            raise left_behind()
        return self._interpreter.bring(TensorSpec.of(mark), [0], None)


def refuse_hidden(name: str, interpreter: Interpreter) -> None:
    """Refuse an operation inside a unit on a placed tensor that was not among the unit's arguments."""
    if interpreter.enclosing is None and not interpreter.is_predicting:
        return
    where = "an operation" if interpreter.enclosing is None else f"a unit ({type(interpreter.enclosing).__name__})"
    raise UnsupportedError(
        f"`{name}` inside {where} meets a placed tensor, which came there in an object or an attribute. Give it as "
        "an argument: bare, or in a tuple, list, dict or dataclass. A loop that computes weights for it "
        "(`torch.func.functional_call`) goes into the `forward` of a module that is a unit."
    )


def refuse_transform(name: str) -> NoReturn:
    """Refuse a call under a transform of ``torch.func``, whose tensors have no stage."""
    raise UnsupportedError(
        f"`{name}` is called under a transform of torch.func (grad, vmap ...) in code above the units. Move the "
        "transform into an nn.Module that belongs to a unit."
    )


def _number_of(bound: Any) -> Any:
    """A bound of a slice as a number; reads its value if it is a tensor."""
    return operator.index(bound) if isinstance(bound, Tensor) else bound
