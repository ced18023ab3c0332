"""Partition of a model: which unit runs on which stage, automatic, by hand, or from a file.

In reading order:

* ``problem``: units with costs, stages with limits, and the objective to minimize.
* ``from_trace``: builds the problem from the trace of a microbatch.
* ``solver``: the best contiguous partition; runs the searches within a budget of simulations.
* ``branch_and_bound``: best-first search over prefixes of partitions.
* ``bounds``: lower bounds on step time and memory of a stage, which prune the search.
* ``evaluation``: simulates candidates and keeps the best one.
* ``sagemaker_tree``: SageMaker's tree algorithm, a baseline and a start of the search.
* ``partition``: the result with its costs and certificate; JSON.
* ``file``: partition files that another run loads.
* ``manual``: stages set by the user.

Nothing here imports torch or knows schedules: ``planning/planner`` passes a simulation to the solver.
"""
