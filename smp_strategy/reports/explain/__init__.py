"""Explanation of a partition: stage of every unit, costs, bottleneck and schedule.

In reading order:

* ``explanation``: the report and its HTML page; text, JSON and HTML of a partition with its schedule.
* ``text``: plain text: summary, tables of stages and modules, order of actions.
* ``text_activations``: sentences and rows about recomputed and offloaded activations.
* ``module_tree``: units as a tree of modules, with sums.
* ``drawings``: its SVG drawings: strip of units, loads of stages, Gantt chart.
* ``command``: ``smp explain``.

Nothing here imports torch.
"""
