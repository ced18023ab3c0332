"""Custom autograd Functions and ``torch.utils.checkpoint`` in the glue, which bypass ``__torch_function__``.

* ``MyFunction.apply(...)`` becomes one operation of the glue and runs, forward and backward, on the stage that has its
  inputs.
* ``checkpoint(...)`` around code of the glue would recompute that code in backward, when its microbatch has ended.
  Instead the units that are called inside are recomputed.

Torch looks up both at every call, so replacing them during a step reaches code that imported them long before.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint as torch_checkpoint

from smp_strategy.activations.policy import ActivationPolicy, Recompute
from smp_strategy.activations.submodules import LayersInARow
from smp_strategy.distributed.torch_private import checkpoints_run_in
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.compiled_code import uncompiled_where
from smp_strategy.model.padded_encoder import padded_encoders
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.placed_tensor import Interpreter, program_of

__all__ = ["refuse_in_function", "watched_entrances"]


@contextmanager
def watched_entrances(current: CurrentProgram, note_values: Callable[[Any], None] | None = None) -> Iterator[None]:
    """Context in which autograd Functions, checkpoints, padded encoders and compiled code in the glue are intercepted.

    Args:
        current: holder of the running program. Checkpoints are intercepted by it rather than by their arguments: these
            may be plain tensors while units are called inside.
        note_values: called with the arguments of autograd Functions, which no mode sees.
    """
    apply = vars(torch.autograd.Function)["apply"]

    def bound(function: Any) -> Callable[..., Any]:
        # It is a class method of Python, or of C (from torch 2.14 on), which has no `__func__`.
        return cast(Callable[..., Any], apply.__get__(None, function))

    def glue() -> Interpreter | None:
        program = current.interpreter
        return None if program is None or program.is_in_unit else program

    def watched_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is torch_checkpoint.CheckpointFunction:
            return _reentrant(bound(function), glue(), *args)
        if note_values is not None and glue() is not None:
            note_values((args, kwargs))
        return _apply(bound(function), function, args, kwargs)

    type.__setattr__(torch.autograd.Function, "apply", classmethod(watched_apply))
    try:
        with (
            checkpoints_run_in(functools.partial(_checkpoint, glue)),
            padded_encoders(lambda: glue() is not None),
            uncompiled_where(lambda: glue() is not None),
        ):
            yield
    finally:
        type.__setattr__(torch.autograd.Function, "apply", apply)


def _apply(original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    program = program_of(args, kwargs)
    if program is None:
        return original(*args, **kwargs)
    if function is BackwardHookFunction:
        raise UnsupportedError(
            "A backward hook is registered on a module above the units, whose input and output are on several stages. "
            "Register it on the modules inside (blocks, layers), or on a tensor."
        )
    before, program.function = program.function, function.__name__
    try:
        return program.operation(function.__name__, original, args, kwargs)
    finally:
        program.function = before


def refuse_in_function(function: str, unit: str) -> NoReturn:
    """Refuse the call of ``unit`` inside of the autograd Function ``function``, which runs as one operation."""
    raise UnsupportedError(
        f"`{function}`, an autograd Function in the code above the units, calls unit `{unit}`, but runs on one stage "
        "as a whole. Let it stay together with the modules that it calls: use `smp_strategy.unit(module)` on the "
        "module that applies it."
    )


def _reentrant(original: Callable[..., Any], program: Interpreter | None, run: Any, preserve: Any, *inputs: Any) -> Any:
    if program is None:
        return original(run, preserve, *inputs)
    # As in torch: if no input requires a gradient, the parameters inside get none either.
    wanted = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs)
    with _recomputing(program, _policy(run, preserve)), torch.set_grad_enabled(wanted):
        return run(*inputs)


def _checkpoint(
    glue: "Callable[[], Interpreter | None]",
    original: Callable[[], Iterator[None]],
    function: Any,
    preserve: bool,
    contexts: Any,
) -> Iterator[None]:
    program = glue()
    if program is None:
        yield from original()
        return
    with _recomputing(program, _policy(function, preserve, contexts)):
        yield


@contextmanager
def _recomputing(program: Interpreter, policy: ActivationPolicy) -> Iterator[None]:
    """Context in which called units are recomputed as asked, unless their own policy recomputes them anyway."""
    before, program.asked = program.asked, policy
    try:
        yield
    finally:
        program.asked = before


def _policy(function: Any, preserve: bool, contexts: Any = torch_checkpoint.noop_context_fn) -> ActivationPolicy:
    """Activation policy that ``checkpoint`` asks for the units that ``function`` calls.

    Context functions of the user (selective checkpointing) are replaced by the package's own, which keep the results of
    matrix products.
    """
    group = function.group if isinstance(function, LayersInARow) else 1
    recompute: Recompute = "all" if contexts is torch_checkpoint.noop_context_fn else "cheap"
    return ActivationPolicy(recompute=recompute, group=group, preserve_rng_state=preserve)
