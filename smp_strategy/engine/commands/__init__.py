"""Commands of ``smp`` that plan, measure or look, without training.

* ``plan_command``: ``smp plan`` and ``smp estimate``.
* ``layout_planning``, ``offline_planning``: the fastest layouts of a cluster; a partition without ranks and memory.
* ``profiling_run``: ``smp profile``: a run that measures units, writes the partition, and ends.
* ``doctor``: ``smp doctor``: this machine, its transports, and what works here.
"""
