"""Planning: predicts the cost of a step, and chooses its partition, its schedule, and what activations are kept.

In reading order:

* ``costs``: times and bytes of unit calls, measured or modelled; :func:`~smp_strategy.planning.costs.find_costs`.
* ``profiling/``: measurement of unit calls, spread over all ranks.
* ``memory/``: predicted and measured bytes of parameters, gradients and optimizer state.
* ``partition/``: which unit goes to which stage; branch and bound with a certificate.
* ``schedule/``: order of forward and backward passes; simulation, published schedules, search.
* ``activation_budget/``: which units recompute or offload activations, so that stages fit their memory limits.
* ``planner``: joins them: the cost of a candidate partition is the simulated time of a step under a schedule.
* ``layouts/``: degrees of parallelism that train a model fastest on a cluster; ``smp plan``.
* ``garbage``: no garbage is collected during a search.
* ``output_file``: atomic writes of partition files and reports.

All decisions are functions of plain data, equal on every rank. ``smp_strategy.engine.decide`` calls the planner, and
``smp_strategy.engine.plan_cache`` the schedule search.
"""
