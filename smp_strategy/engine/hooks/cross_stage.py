"""Cross-stage view: hooks see all weights and gradients, although each stage has only its own.

Hooks that average weights, clip them, log norms or rescale gradients iterate over ``model.parameters()`` as in a single
process. While such a hook runs, on every stage alike, every parameter, buffer and gradient is a
:class:`~smp_strategy.model.guarded_tensors.GuardedTensor`. Its *home* is the set of stages that have the values.

[Note: where hooks compute] Operations on such tensors come here.

* [1] If Python reads values (``.item()``, ``if norm > 1``), a tensor that every stage has is changed, or the shape of
  the result depends on values, then operands are sent to all stages, and all compute.
* [2] An operation that changes a tensor runs in the home of that tensor; other operands are sent there.
* [3] Any other operation runs in the smallest home among its operands, the largest operand's if several are as small.
  Its result lives there; other stages know metadata only.
* [4] An operation that draws random numbers advances the global generators of all stages, as in a single process.

So averaging and clipping cost no communication, numbers are equal everywhere, and results that the user keeps (shadow
weights, backups, copies of the model) stay where they are, for later hooks. Calls of the model itself run on their
stages as in a step.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import PROGRAM
from smp_strategy.distributed.message_tags import HOOKS
from smp_strategy.engine.hooks.cross_stage_inference import CrossStageInference
from smp_strategy.engine.hooks.full_parameters import FullParameters
from smp_strategy.model.guarded_tensors import in_plain_sight, placeholder, unwatch, watch
from smp_strategy.model.ownership import HomeStages, home_of, spec_of
from smp_strategy.model.trace.prediction import Made, Same, Unpredictable
from smp_strategy.model.trace.pytree import flatten_call, flatten_result, unflatten_call
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.isolation.global_rng import GlobalGenerators
from smp_strategy.pipeline.placed_ops import READ_NAMES
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.shared_tensors.weight_operations import changed_by, one_by_one
from smp_strategy.pipeline.step_end import THE_END
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["HookView"]

_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data
_SAME_METADATA = (_DATA.__get__, Tensor.detach, Tensor.clone)
# In names of operations that write random numbers to a given tensor.
_RANDOM = ("uniform", "normal", "rand", "bernoulli", "dropout", "exponential", "geometric", "cauchy", "nomial", "rrelu")


@final
class HookView:
    """View of all parameters across stages during a hook. Enter it on all stages of a replica alike.

    Attributes:
        generators: Global generators, which follow draws on some of the stages.
    """

    def __init__(
        self, holdings: Holdings, full: FullParameters, transport: Transport, inference: CrossStageInference
    ) -> None:
        # In the same order on every rank.
        self._parameters = list(holdings.names)
        self._full = full
        self._ownership = holdings.ownership
        self._mesh = holdings.mesh
        self.generators = GlobalGenerators(torch.device(self._mesh.device_type), self._to_others)
        self._exists: dict[int, bool] | None = None
        self._gradients: dict[int, Tensor | None] = {}
        self._transport = transport
        self._inference = inference
        # All transfers in order: equal on all stages if these run the same code.
        self._path: list[str] = []

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which operations on parameters and on tensors made of them come here."""
        self._open()
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context inside of :meth:`shown` in which parameters are as outside of hooks."""
        self._close()
        try:
            yield
        finally:
            self._open()

    def _open(self) -> None:
        self._full.open(self._make_whole)
        self._watch()

    def _close(self) -> None:
        self._unwatch()
        self._full.close()
        self._exists = None
        self._gradients.clear()

    def _make_whole(self) -> None:
        """Gather sharded and split parameters before the first use of anything."""
        if self._full.is_whole:
            return
        self._unwatch()
        self._full.make_whole()
        self._watch()

    def _watch(self) -> None:
        ownership = self._ownership
        for _, tensor, home in [*ownership.residents(), *ownership.guests()]:
            if home.is_here and home_of(tensor) is None:
                watch(tensor, home)
        ownership.sight.call, ownership.sight.copy = self.call, self._copy
        ownership.sight.make_whole = self._make_whole if self._full.has_parts else None

    def _unwatch(self) -> None:
        ownership = self._ownership
        ownership.sight.call = ownership.sight.copy = ownership.sight.make_whole = None
        for _, tensor, home in [*ownership.residents(), *ownership.guests()]:
            if home.is_here and home_of(tensor) is not None:
                unwatch(tensor)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation on tensors with a home; see [Note: where hooks compute]."""
        self._make_whole()
        if func == _GRADIENT.__get__:
            return self._gradient(args[0])
        if func in (_GRADIENT.__set__, _GRADIENT.__delete__):
            return self._set_gradient(args[0], self._settled(args[1]) if len(args) > 1 else None)
        if func == _DATA.__set__:
            return self._set_data(args[0], self._settled(args[1]))
        name = str(getattr(func, "__name__", func))
        if name.startswith("_foreach_"):
            return self._for_each(func, name, args, kwargs)
        with in_plain_sight():
            return self._call(func, name, args, kwargs)

    def agree(self) -> None:
        """Verify that the hook did the same on all stages; collective.

        Raises:
            UnsupportedError: it did not.
        """
        Ledger(probes=True).note(PROGRAM, "\n".join(self._path)).compare(THE_END, self._transport.group)

    def real(self, tree: Any) -> Any:
        """``tree`` with the values of all its tensors, on every stage."""
        return pytree.tree_map(lambda leaf: self._everywhere(leaf) if home_of(leaf) is not None else leaf, tree)

    def collected(self, tree: Any) -> Any:
        """``tree`` with the values of all its tensors on the first rank of the replica, and ``None`` elsewhere."""
        collector = self._mesh.pp - 1

        def collect(leaf: Any) -> Any:
            leaf = self._settled(leaf)
            if home_of(leaf) is None:
                return leaf
            value = self._at(leaf, collector)
            return None if value is None else value.cpu().clone()

        return pytree.tree_map(collect, tree)

    def held(self, tree: Any) -> Any:
        """``tree`` with a :class:`HeldTensor` of this rank's share for each tensor that lives on stages."""

        def hold(leaf: Any) -> Any:
            leaf = self._settled(leaf)
            if home_of(leaf) is None:
                return leaf
            with in_plain_sight():
                spec, value = spec_of(leaf), leaf.detach()
            if _home(leaf).is_here:
                return HeldTensor.whole(value)
            return HeldTensor(shape=tuple(spec.size), dtype=spec.dtype, blocks=())

        return pytree.tree_map(hold, tree)

    # Operations

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        leaves, structure = flatten_call(args, kwargs)
        leaves = [self._settled(leaf) for leaf in leaves]
        homed = [leaf for leaf in leaves if home_of(leaf) is not None]
        target = changed_by(name, args, kwargs)
        target = target[0] if isinstance(target, (list, tuple)) else target
        if name in READ_NAMES or (target is not None and home_of(target) is None):
            # [1] A tensor that every stage has must change alike on every stage.
            return self._with_values(func, leaves, structure)
        # [2] and [3]
        few = min(len(_home(tensor).holders) for tensor in homed)
        largest = max((t for t in homed if len(_home(t).holders) == few), key=lambda tensor: tensor.numel())
        holders = _home(largest if target is None else target).holders
        leaves = [self._moved(leaf, holders) for leaf in leaves]
        if target is not None:
            self._run(func, leaves, structure, holders, any(word in name for word in _RANDOM))
            return None if name == "__setitem__" or name.startswith("_foreach_") else target
        if func in _SAME_METADATA:
            made = self._run(func, leaves, structure, holders, draws=False)
            return self._make(made, spec_of(leaves[0]), holders)
        foreseen = self._inference.of(func, leaves, structure)
        if isinstance(foreseen, Unpredictable):  # [1]
            return self._with_values(func, leaves, structure)
        made = self._run(func, leaves, structure, holders, foreseen.random)
        is_here = self._mesh.stage in holders
        found = flatten_result(made, leaves)[0] if is_here else [None] * len(foreseen.outputs)
        results = []
        for told, real in zip(foreseen.outputs, found, strict=True):
            if isinstance(told, Same):
                results.append(leaves[told.leaf])
            else:
                results.append(self._make(real, told.spec, holders) if isinstance(told, Made) else told)
        return pytree.tree_unflatten(results, foreseen.structure)

    def _with_values(self, func: Any, leaves: list[Any], structure: Any) -> Any:
        """Let every stage run ``func``, with the values of all operands."""
        values = [self._everywhere(leaf) if home_of(leaf) is not None else leaf for leaf in leaves]
        args, kwargs = unflatten_call(values, structure)
        return func(*args, **kwargs)

    def _run(self, func: Any, leaves: list[Any], structure: Any, holders: frozenset[int], draws: bool) -> Any:
        """Result of ``func`` on the stages ``holders``; ``None`` elsewhere."""
        made = None
        if self._mesh.stage in holders:
            args, kwargs = unflatten_call(leaves, structure)
            with in_plain_sight(), torch.no_grad():
                made = func(*args, **kwargs)
        if draws:  # [4]
            self.generators.follow(holders, leaves)
        return made

    def _for_each(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a ``_foreach_`` operation tensor by tensor: they may live on different stages."""
        results = []
        for one in one_by_one(args):
            homed = any(home_of(leaf) is not None for leaf in pytree.tree_leaves((one, kwargs)))
            with in_plain_sight():
                results.append(self._call(func, name, one, kwargs) if homed else func(*one, **kwargs))
        return None if name.endswith("_") else [item for result in results for item in result]

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        holders = _home(tensor).holders
        value = self._moved(value, holders)
        with in_plain_sight():
            if self._mesh.stage in holders:
                tensor.data = value
            elif tensor.shape != value.shape or tensor.dtype != value.dtype:
                tensor.data = _placeholder(spec_of(value))

    def _copy(self, tensor: Tensor) -> Tensor:
        self._make_whole()
        home = _home(tensor)
        with in_plain_sight():
            value = tensor.detach().clone() if home.is_here else None
            made = _placeholder(spec_of(tensor)) if value is None else value
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return self._take_in(made, home.holders, spec_of(tensor).stride)

    # Gradients

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        if self._exists is None:
            with in_plain_sight():
                mine = torch.tensor([p.grad is not None for p in self._parameters])
                spec = spec_of(mine)
                everyones = [self._sent(mine, spec, s, range(self._mesh.pp), "gradients") for s in range(self._mesh.pp)]
                exists = torch.stack([found for found in everyones if found is not None]).any(0).tolist()
            self._exists = {id(p): here for p, here in zip(self._parameters, exists, strict=True)}
        if id(parameter) not in self._gradients:
            shown = None
            with in_plain_sight():
                gradient = parameter.grad
            if self._exists.get(id(parameter), False):
                home = _home(parameter)
                if gradient is None and home.is_here:  # one of several holders that did not use it
                    gradient = torch.zeros_like(parameter.detach())
                    parameter.grad = gradient
                shown = self._make(gradient, spec_of(parameter), home.holders)
            self._gradients[id(parameter)] = shown
        return self._gradients[id(parameter)]

    def _set_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        self._gradient(parameter)
        holders = _home(parameter).holders
        value = None if value is None else self._moved(value, holders)
        self._gradients[id(parameter)] = value
        with in_plain_sight():
            parameter.grad = value if self._mesh.stage in holders else None

    # Where tensors are

    def _settled(self, leaf: Any) -> Any:
        """``leaf`` with a home, if it is a placed tensor (the hook has called the model)."""
        if not isinstance(leaf, PlacedTensor):
            return leaf
        value = None if leaf.origin is None else leaf.origin[1].detach()
        return self._make(value, leaf.spec, frozenset({leaf.program.lives_on(leaf)}))

    def _moved(self, leaf: Any, holders: frozenset[int]) -> Any:
        if home_of(leaf) is None or holders <= _home(leaf).holders:
            return leaf
        if len(holders) > 1:
            value: Tensor | None = self._everywhere(leaf)
        else:
            value = self._at(leaf, min(holders))
        return self._make(value, spec_of(leaf), holders)

    def _at(self, tensor: Tensor, stage: int) -> Tensor | None:
        """Values of ``tensor`` on ``stage``; ``None`` elsewhere."""
        home = _home(tensor)
        source = stage if stage in home.holders else min(home.holders)
        with in_plain_sight():
            value = tensor.detach() if self._mesh.stage == source else None
            return self._sent(value, spec_of(tensor), source, [stage], home.name)

    def _everywhere(self, tensor: Tensor) -> Tensor:
        """Values of ``tensor`` on every stage, sent by its first holder so that all read the same bits."""
        home = _home(tensor)
        with in_plain_sight():
            value = tensor.detach().clone() if self._mesh.stage == min(home.holders) else None
            found = self._sent(value, spec_of(tensor), min(home.holders), range(self._mesh.pp), home.name)
        assert found is not None
        return found

    def _to_others(self, states: Tensor, holders: Collection[int]) -> Tensor | None:
        others = [stage for stage in range(self._mesh.pp) if stage not in holders]
        return self._sent(states, spec_of(states), min(holders), others, "random numbers")

    def _sent(
        self, value: Tensor | None, spec: TensorSpec, source: int, targets: Collection[int], name: str
    ) -> Tensor | None:
        """``value``, which stage ``source`` has, on the stages ``targets``; ``None`` elsewhere."""
        stage, tag = self._mesh.stage, HOOKS + len(self._path)
        self._path.append(f"{name} from stage {source}")
        if stage == source:
            assert value is not None
            for target in targets:
                if target != stage:
                    self._transport.send(value, spec, target, tag)
            return value if stage in targets else None
        return self._transport.receive(spec, source, tag).wait() if stage in targets else None

    def _make(self, value: Tensor | None, spec: TensorSpec, holders: frozenset[int]) -> Tensor:
        """Tensor that lives on ``holders``: ``value`` there, elsewhere a placeholder with the metadata ``spec``."""
        if value is not None and home_of(value) is not None:
            return value
        if value is None or self._mesh.stage not in holders:
            value = _placeholder(spec)
        return self._take_in(value, holders, spec.stride)

    def _take_in(self, tensor: Tensor, holders: frozenset[int], stride: tuple[int, ...]) -> Tensor:
        home = HomeStages(
            name="a tensor made in a hook",
            holders=holders,
            stage=self._mesh.stage,
            stride=stride,
            sight=self._ownership.sight,
        )
        watch(tensor, home)
        self._ownership.take_in(tensor, home)
        return tensor


def _home(tensor: Any) -> HomeStages:
    home = home_of(tensor)
    assert home is not None
    return home


def _placeholder(spec: TensorSpec) -> Tensor:
    return placeholder(spec.size, spec.dtype, spec.device)
