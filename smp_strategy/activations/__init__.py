"""Activation checkpointing and offload of units; the same numbers with less memory. In reading order:

* ``policy``: activations of one unit: keep, recompute, offload; traffic of a step.
* ``selection``: options, and requests by ``set_activation_checkpointing``, become policies by unit.
* ``unit_wrapper``: wraps the calls of a stage's units as their policies say; start here.
* ``checkpoint``: one recomputed call: slots instead of saved tensors, filled by a second run; its saved arguments;
  consecutive calls that are recomputed together.
* ``checkpoint_state``: snapshot of module state, autocast and generators for the second run.
* ``selective``: results of matrix products that are kept.
* ``submodules``: checkpointing of modules inside units, and of layers in a row.
* ``offload``: which call's tensors leave when, and when they return.
* ``offload_tensors``: one range of a storage on its way to the host and back.

Copies and page-locked memory are in ``distributed.host_copies`` and ``distributed.pinned_pool``; which units of a full
stage recompute is decided in ``planning.activation_budget``.
"""
