"""Activation checkpointing and offload of units; the same numbers with less memory. In reading order:

* ``policy``: activations of one unit: keep, recompute, offload.
* ``annotations``: requests by hand, ``set_activation_checkpointing``.
* ``selection``: options and requests become policies by unit.
* ``unit_wrapper``: wraps the calls of a stage's units as their policies say; start here.
* ``checkpoint``: one recomputed call: slots instead of saved tensors, filled by a second run.
* ``checkpoint_inputs``: its saved arguments.
* ``checkpoint_state``: snapshot of module state, autocast and generators for the second run.
* ``checkpoint_groups``: consecutive calls that are recomputed together.
* ``selective``: results of matrix products that are kept.
* ``checkpoint_sequential``: SageMaker's function for layers in a row.
* ``submodules``: checkpointing of modules inside units.
* ``offload``: which call's tensors leave when, and when they return.
* ``offload_tensors``: one range of a storage on its way to the host and back.
* ``offload_stats``: traffic of a step.

Copies and page-locked memory are in ``distributed.host_copies`` and ``distributed.pinned_pool``; which units of a full
stage recompute is decided in ``planning.activation_budget``.
"""
