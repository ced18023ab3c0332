"""Results of model calls: merge those of the microbatches and connect them to the script's autograd graph.

The results of microbatches are real on every rank, but detached. Custom autograd nodes connect them to the graph of the
script: the node of a loss hands over gradients that exist already; the nodes of other results beside a loss refuse,
because their backward is over; and if backward is still to come, one node collects the gradients of all results of all
microbatches. Results are then merged by ordinary differentiable operations.

With ``prescaled_batch=False`` the ranks of a tensor-parallel group read samples of their own, but a call of the model
computes the samples of all of them. To the script each rank is a separate process, with its own batch and its own loss
of the results. So each rank gets back the results of its own samples; and if the script computes the loss, gradients
with respect to all samples are those of all ranks' losses, averaged like gradients of replicas. A loss that the model
computes is the mean over the samples of the whole group, on each rank: the mean over the processes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, final

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed.torch_private import keeps_graph
from smp_strategy.engine.deferred_loss import ForwardStep
from smp_strategy.engine.join_results import merge
from smp_strategy.engine.model_calls.model_inputs import ModelInputs
from smp_strategy.engine.step_results import on_graph
from smp_strategy.errors import SMPError, UnsupportedError
from smp_strategy.model.trace.pytree import flatten_output, items_of, nodes

__all__ = [
    "OmittedResult",
    "Packed",
    "ResultLeaves",
    "InputGradients",
    "gradients_come_later",
    "is_differentiable",
    "joined",
    "loss_in",
    "only_of_input",
    "only_once",
    "pack",
    "place_on_graph",
    "replace_loss",
    "with_loss",
]


class Packed(NamedTuple):
    """Result of the model for a microbatch, in the form that is sent to all ranks."""

    result: Any
    """The result, with placeholders for objects that cannot be sent."""
    places: tuple[int, ...]
    """Indices of the differentiable leaves of ``result``."""


@final
class OmittedResult:
    """Placeholder for a result that stays with the stages; any use raises."""

    def __init__(self, what: str, remedy: str) -> None:
        self._what = what
        self._remedy = remedy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OmittedResult) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._what}, left behind>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection
            raise AttributeError(name)
        raise UnsupportedError(f"{self._what} stays with the stages that have made it. {self._remedy}")


def loss_in(result: Any) -> Tensor | None:
    """Find the loss, a float scalar: item or attribute ``loss``, the first item of a tuple, or the result itself."""
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif isinstance(result, (tuple, list)) and not hasattr(result, "loss"):
        found = result[0] if result else None
    else:
        found = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    return found if isinstance(found, Tensor) and found.is_floating_point() and found.ndim == 0 else None


def replace_loss(result: Any, loss: Tensor) -> Any:
    """Rebuild ``result`` with ``loss`` in the place of its own."""
    leaves, structure = flatten_output(result)
    own = loss_in(result)
    return pytree.tree_unflatten([loss if leaf is own else leaf for leaf in leaves], structure)


def joined(outputs: Sequence[Any], sizes: Sequence[int], *, sums: bool) -> Any:
    """Join the results of the microbatches, whose loss is a sum over samples if it ``sums``, else a mean."""
    result = merge(outputs, sizes)
    losses = [loss for loss in map(loss_in, outputs) if loss is not None]
    if not sums or len(losses) < len(outputs):
        return result
    return replace_loss(result, sum(losses[1:], losses[0]))


def pack(result: Any, *, only_loss: bool = False) -> Packed:
    """Prepare the result of a microbatch for sending; its tensors may be placed on other stages."""
    leaves, structure = flatten_output(result)
    loss = loss_in(result)
    carried = [_carried(leaf, only_loss=only_loss and leaf is not loss) for leaf in leaves]
    places = [place for place, leaf in enumerate(carried) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return Packed(pytree.tree_unflatten(carried, structure), tuple(places))


def _carried(leaf: Any, *, only_loss: bool) -> Any:
    if isinstance(leaf, Tensor):
        if not only_loss:
            return leaf
        remedy = "Set `training_outputs=all` in SMPPlugin to get it on every rank."
        return OmittedResult("With `training_outputs=loss` all that the model returns beside its loss", remedy)
    if any(isinstance(node, Tensor) for _, node in nodes(leaf, _opened, levels=5)):
        name = type(leaf).__name__
        remedy = "Call `model.generate`, which uses it, or keep the model from making it (`use_cache=False`)."
        return OmittedResult(f"The {name} that the model returns", remedy)
    return leaf


def _opened(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, (Mapping, list, tuple, set)):
        return items_of(list(node) if isinstance(node, set) else node)
    return () if isinstance(node, (Tensor, type)) else getattr(node, "__dict__", {}).items()


def is_differentiable(packed: Packed) -> bool:
    """Whether any tensor of the result has gradients."""
    return bool(packed.places)


@final
class ResultLeaves:
    """Differentiable leaves of the results of all microbatches.

    Attributes:
        places: numbers of their microbatches, and their positions among all leaves there.
    """

    def __init__(self, outputs: Sequence[Packed]) -> None:
        # `places` index the leaves of the whole `Packed`, whose first part is the result.
        self._leaves = [flatten_output(packed)[0] for packed in outputs]
        self.places = [(number, place) for number, packed in enumerate(outputs) for place in packed.places]
        self.tensors: list[Tensor] = [self._leaves[number][place] for number, place in self.places]

    def gradients(
        self, found: Sequence[Tensor | None], combine: Callable[[Tensor], Tensor] | None
    ) -> list[list[Tensor | None]]:
        """Gradients of all leaves of each microbatch, of which ``found`` are those of these."""
        given: list[list[Tensor | None]] = [[None] * len(each) for each in self._leaves]
        for (number, place), gradient in zip(self.places, found, strict=True):
            given[number][place] = gradient if combine is None or gradient is None else combine(gradient)
        return given


class InputGradients(NamedTuple):
    """Gradients of inputs, computed before the script calls backward."""

    of: Sequence[Tensor]
    """Differentiable inputs of the model."""
    gradients: Sequence[Tensor]
    factor: float
    """Factor of the loss in these gradients."""

    def at(self, gradient: Tensor) -> list[Tensor]:
        """Gradients of the inputs for a ``gradient`` of the loss."""
        scale = gradient / gradient.new_tensor(self.factor)
        return [each * scale for each in self.gradients]


def with_loss(
    outputs: Sequence[Packed],
    sizes: Sequence[int],
    loss: Tensor,
    commit: Callable[[Tensor], None],
    *,
    remedy: str,
    inputs: InputGradients,
) -> Any:
    """Merge the results of a step whose backward has run; the loss in them hands over the gradients.

    Args:
        commit: adds gradients times the given number to ``.grad``.
        remedy: advice in the error about gradients of other results.
    """

    def refuse(gradients: Sequence[Tensor | None], trains: bool) -> NoReturn:
        raise UnsupportedError(
            "Backward reaches something that the model has returned beside its loss, but backward of this call has run "
            f"already, together with forward, for the loss alone. {remedy}"
        )

    ended = [place_on_graph(packed, lambda leaves: on_graph(leaves, (), refuse)) for packed in outputs]
    commit_once = only_once(commit)

    def hand_over(gradients: Sequence[Tensor | None], trains: bool) -> Sequence[Tensor]:
        [gradient] = gradients
        assert gradient is not None
        if trains:
            commit_once(gradient)
        return inputs.at(gradient)

    [handed] = on_graph([loss.detach().clone()], inputs.of, hand_over)
    return replace_loss(merge(ended, sizes), handed)


def gradients_come_later(
    step: ForwardStep, inputs: ModelInputs, *, sums: bool, combine: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Merge the results of a step whose backward runs when the script calls it.

    Args:
        sums: whether a loss among the results is a sum over samples.
        combine: combines the gradients of a result over the ranks of a replica, if they differ.
    """
    leaves = ResultLeaves(step.outputs)

    def run(gradients: Sequence[Tensor | None], trains: bool) -> list[Tensor]:
        if not trains:
            raise only_of_input()
        step.backward(leaves.gradients(gradients, combine), retain_graph=keeps_graph())
        return inputs.gradients() if inputs else []

    later = iter(on_graph(leaves.tensors, inputs.tensors, run))
    ended = [place_on_graph(packed, lambda of: [next(later) for _ in of]) for packed in step.outputs]
    return joined(ended, step.sizes, sums=sums)


def place_on_graph(packed: Packed, hang: Callable[[list[Tensor]], Sequence[Tensor]]) -> Any:
    """The result in ``packed``, whose differentiable leaves are those that ``hang`` returns for them."""
    leaves, structure = flatten_output(packed.result)
    if packed.places:
        for place, tensor in zip(packed.places, hang([leaves[place] for place in packed.places]), strict=True):
            leaves[place] = tensor
    return pytree.tree_unflatten(leaves, structure)


def only_once(act: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``act`` to refuse a second call, because gradients are handed over once."""
    calls = 0

    def once(given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise SMPError(
                "Backward reaches the loss of the same call of the model a second time, but its gradients are handed "
                "over once. Add up what depends on it and call backward once, or set `loss_in_model=False` in "
                "SMPPlugin, which allows for `retain_graph=True`."
            )
        act(given)

    return once


def only_of_input() -> UnsupportedError:
    """Error for a gradient of inputs alone, where those of the parameters are computed with it."""
    return UnsupportedError(
        "`torch.autograd.grad` asks for the gradient of what the model was called with, and for none of its "
        "parameters, which get theirs in the same backward. Call `backward` and look at `.grad` of the input, "
        "and set those of the parameters to zero before they are trained."
    )
