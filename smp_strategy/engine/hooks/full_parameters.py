"""Full parameters in hooks, as by FSDP's ``summon_full_params``, but gathered on first use.

Hooks are written for a single process. At the first use in a hook, all parameters and gradients that are sharded over a
shard group, or split over tensor-parallel ranks, are gathered; after the hook each rank keeps its own part of the
changed values. A hook without a use costs one small message. With split layers, reading a size is a use as well,
because a hook expects the sizes of full parameters.

A hook that uses weights, or calls the model, on some ranks only raises an error on all ranks and blocks none: ranks
compare what they are about to do. While a hook calls units of the model, their layers compute with their parts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import BY_IDENTITY, HARMLESS, SIZES, Guard, untracked, unwatch, watch
from smp_strategy.model.ownership import resize

__all__ = ["FullSplitLayers", "FullParameters"]


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    """``tensor`` with ``values``, or ``values`` themselves if the user has changed the dtype or device."""
    is_alike = tensor.dtype == values.dtype and tensor.device == values.device
    return tensor.copy_(values) if is_alike else values


def _call(args: Any, kwargs: Any) -> str:
    """Description of a unit call in a hook; ranks that make the same call have inputs of the same shapes."""
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return f"a call of the model in a hook, with tensors of the shapes {shapes}"


@final
class FullSplitLayers:
    """Shows hooks the full parameters of split layers.

    Attributes:
        is_split: Whether other ranks have parts.
        is_whole: Whether parameters and gradients are full now.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._parts = parts = holdings.parts
        self._here = [parameter for parameter in parts.cuts if holdings.is_here(parameter)]
        self._away = [parameter for parameter in parts.cuts if not holdings.is_here(parameter)]
        self.is_split = parts.is_split
        self._kept: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        self._watched: list[nn.Parameter] = []
        self._make_whole: Callable[[], None] | None = None
        self._is_used = self._is_open = False
        self.is_whole = not self.is_split

    @contextmanager
    def open(self, make_whole: Callable[[], None] | None = None) -> Iterator[None]:
        """Context of user code. Collective over the ranks that have the parts. The first use calls ``make_whole``,
        which must call :meth:`show`; ``None``: the caller detects uses.
        """
        self._make_whole, self._is_used, self._is_open = make_whole, False, True
        self._watch()
        try:
            yield
            if not self._is_used:
                self._agree_on_use(is_used=False)
        finally:
            self._unwatch()
            self._make_whole, self._is_open = None, False
            self.hide()

    def note_use(self) -> None:
        """First use: an error unless all ranks make it. Collective."""
        self._is_used = True
        self._unwatch()
        self._agree_on_use(is_used=True)

    def show(self) -> None:
        """Gather parameters and gradients. Collective."""
        self.is_whole = True
        with self._parts.group.meeting("whole weights in a hook"):
            self._show_here()
        for parameter in self._away:
            resize(parameter, self._parts.whole_shape(parameter))

    def hide(self) -> None:
        """If parameters and gradients are full, let each rank have its part of the changed values again."""
        if self.is_whole:
            self._hide_here()
            for parameter in self._away:
                resize(parameter, self._parts.shape(parameter))
        self.is_whole = not self.is_split

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which calls a unit, with its layers computing with their parts."""
        if not (self._is_open and self.is_split):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self._unwatch()
            with self._parts.group.meeting(_call(args, kwargs)):
                if not self.is_whole:
                    try:
                        return function(*args, **kwargs)
                    finally:
                        self._watch()
                self._hide_here()
                result = function(*args, **kwargs)
                self._show_here()
                return result

        return call

    @untracked()
    def _show_here(self) -> None:
        for parameter in self._here:
            data, gradient = parameter.data, parameter.grad
            self._kept.append((parameter, data, gradient))
            parameter.grad = None
            parameter.data = self._parts.join(parameter, data)
            if gradient is not None:
                parameter.grad = self._parts.join(parameter, gradient)

    @untracked()
    def _hide_here(self) -> None:
        for parameter, data, gradient in self._kept:
            whole, of_whole = parameter.data, parameter.grad
            parameter.grad = None
            parameter.data = _filled(data, self._parts.part(parameter, whole))
            if of_whole is not None:
                part = self._parts.part(parameter, of_whole)
                parameter.grad = part if gradient is None else _filled(gradient, part)
        self._kept.clear()

    def _watch(self) -> None:
        if self._make_whole is None:
            return
        guard = _PartInHook(self._make_whole)
        for parameter in self._here:
            if type(parameter) is nn.Parameter:  # guarded ones detect uses themselves
                watch(parameter, guard)
                self._watched.append(parameter)

    def _unwatch(self) -> None:
        for parameter in self._watched:
            unwatch(parameter)
        self._watched.clear()

    def _agree_on_use(self, *, is_used: bool) -> None:
        group = self._parts.group
        num_users = sum(group.numbers(is_used, "weights of split layers in a hook"))
        if num_users not in (0, group.size):
            raise UnsupportedError(
                f"A hook uses weights or gradients of split layers (`tensor_parallel_degree`) on {num_users} of "
                f"{group.size} ranks that have parts ({'' if is_used else 'not '}on this one), but it takes all. "
                f"Let all ranks run the same code, with `{door_words().on_one}...` around what is done with the "
                "result only."
            )


@final
class _PartInHook(Guard):
    """Guard of parts of split parameters in a hook: the first use gathers all of them."""

    free = (HARMLESS | BY_IDENTITY) - SIZES

    def __init__(self, make_whole: Callable[[], None]) -> None:
        self._make_whole = make_whole

    def lift(self) -> None:
        self._make_whole()


@final
class FullParameters:
    """Full parameters and gradients of sharded units and of split layers in hooks."""

    def __init__(self, holdings: Holdings) -> None:
        self._sharded, self._layers = holdings.sharded, FullSplitLayers(holdings)
        self._whole = ExitStack()

    @property
    def is_whole(self) -> bool:
        """Whether parameters and gradients are full now."""
        return self._sharded.is_whole and self._layers.is_whole

    @property
    def has_parts(self) -> bool:
        """Whether sizes of parameters may be those of parts now."""
        return not self._layers.is_whole

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which calls a unit, with its layers computing with their parts."""
        return self._layers.around(function)

    def open(self, make_whole: Callable[[], None] | None = None) -> None:
        """Make them full from their first use on, until :meth:`close`. Collective over the ranks that have parts.

        Args:
            make_whole: Called at the first use; must call :meth:`make_whole`. The caller also detects uses of split
                layers then. ``None``: nobody else needs to know.
        """
        used, sizes = make_whole or self.make_whole, self._layers.is_split
        self._whole.enter_context(self._sharded.in_sight(used, sizes=sizes))
        self._whole.enter_context(self._layers.open(self.make_whole if make_whole is None else None))

    def close(self) -> None:
        """Let each rank have its own part of the changed values again."""
        self._whole.close()

    def make_whole(self) -> None:
        """Gather them. Collective."""
        self._layers.note_use()
        self._sharded.show_whole()
        self._layers.show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which they are full from their first use on."""
        self.open()
        with self._whole:
            yield

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context inside of :meth:`shown` in which they are as outside of hooks."""
        self.close()
        try:
            yield
        finally:
            self.open()

    def collected(self, tree: Any) -> Any:
        """``tree`` itself: every rank has its values."""
        return tree
