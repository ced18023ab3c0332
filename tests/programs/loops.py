"""Accelerators for training loops in forked ranks, plain or with a plugin."""

import os

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

__all__ = ["accelerator", "whole_weights"]


def accelerator(smp=None, **options):
    """An Accelerator as in a new process; plain if ``smp`` is ``None``."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if smp is None:
        os.environ.pop("LOCAL_RANK", None)
        return Accelerator(cpu=True, **options)
    from smp_strategy import SMPPlugin

    return Accelerator(cpu=True, parallelism_config=SMPPlugin(**smp), **options)


def whole_weights(accelerator, model):
    """All weights under their plain names, on every rank."""
    return {name: value.detach().clone() for name, value in accelerator.get_state_dict(model).items()}
