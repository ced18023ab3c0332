"""Pipeline schedules: the order of forward and backward passes on every stage.

In reading order:

* ``flow``: segment graph of a microbatch, the input of all schedulers.
* ``policies``: schedules by name (GPipe, 1F1B, Zero Bubble ...), and the placement of chunks that they need.
* ``published``: their published tables of passes. A new schedule: see "Where to add" in ``CONTRIBUTING.md``.
* ``step_graph``: passes of a step with costs and dependencies; times of any order.
* ``list_scheduling``: greedy order by priorities, for any segment graph.
* ``simulate``: the schedule of a policy: the best of its published and greedy orders.
* ``steps_in_a_row``: steady-state time of steps that follow each other.
* ``scoring``: objective and limits of the search.
* ``local_search``: tabu search on the critical path.
* ``search``: the fastest schedule under memory limits (``pipeline=auto``); weight gradients in idle times.
* ``peak_memory``: activations of each stage over time.
* ``check_plan``: verifies that a plan is complete and free of deadlock.

The result is a :class:`~smp_strategy.pipeline.schedule.Plan`. Nothing here imports torch.
"""
