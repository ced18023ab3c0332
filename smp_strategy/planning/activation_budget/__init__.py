"""Activation budget: which units recompute or offload activations, so that stages fit their memory limits.

In reading order:

* ``allocate``: the loop: simulate a step, find the fullest moments, choose for the units of each stage, repeat.
* ``call_costs``: seconds and bytes of a unit call under a choice of recomputation and offload.
* ``knapsack``: multiple-choice knapsack by dynamic programming: the fastest choice that fits at all moments. Its
  Lagrangian relaxation prunes states and finds good choices.

Moments, at which stages are fullest, come from ``planning/schedule/peak_memory``. The choice itself, an
:class:`~smp_strategy.activations.policy.ActivationPolicy` per unit, is carried out by ``smp_strategy.activations``.
Nothing here imports torch.
"""
