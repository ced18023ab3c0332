"""Memory estimates: bytes of parameters, gradients and optimizer state on each rank.

In reading order:

* ``model``: prediction per parameter and unit from shapes alone, before anything is sharded.
* ``sharded``: the same for flat buffers of a shard group, at rest and at their peak in a step; memory of one rank by
  kind, as plain numbers.
* ``counting``: measured memory of this rank, storage by storage.

Activations are predicted elsewhere: per call in ``smp_strategy.model.trace``, per stage and schedule in
``planning/schedule/peak_memory``. ``smp_strategy.reports.memory_report`` shows predicted and measured bytes side by
side.
"""
