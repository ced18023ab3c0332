"""Updates of optimizers, as all doors make them.

* ``optimizer_steps``: hooks of steps, closures, modes of schedule-free optimizers.
* ``grad_scaler``, ``loss_scale``: loss scaling in agreement over all ranks, and its rules (pure).
"""
