"""Layouts of a job on a cluster: which degrees of parallelism train a model fastest within the devices' memory.

In reading order:

* ``cluster``: devices, nodes and links, with the time of a ring; degrees, microbatches and recomputation of a job, and
  all layouts of a cluster.
* ``estimate``: seconds and bytes of a layout by category; a rough estimate of all layouts, and the planner's for the
  best.

All functions work on plain data; :mod:`smp_strategy.engine.commands.layout_planning` traces the model.
"""
