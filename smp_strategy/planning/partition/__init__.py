"""Partition of a model: which unit runs on which stage, automatic, by hand, or from a file.

In reading order:

* ``problem``: units with costs, stages with limits, and the objective to minimize; built from the trace of a
  microbatch.
* ``solver``: the best contiguous partition; runs the searches within a budget of simulations.
* ``branch_and_bound``: best-first search over prefixes of partitions; lower bounds on step time and memory of a stage,
  which prune it; simulation of candidates, of which the best is kept.
* ``sagemaker_tree``: SageMaker's tree algorithm, a baseline and a start of the search.
* ``partition``: the result with its costs and certificate; JSON.
* ``user_partition``: partition files that another run loads; stages set by the user.

Nothing here imports torch or knows schedules: ``planning/planner`` passes a simulation to the solver.
"""
