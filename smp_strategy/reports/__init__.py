"""Reports for people: text for a terminal, JSON, and HTML pages without scripts.

In reading order:

* ``report``: base class: three forms, saved by the suffix of the file.
* ``table``: tables, and plain text for a terminal.
* ``html``: pages, elements, tables, SVG.
* ``explain/``: explanation of a partition and its schedule; ``strategy.explain()``, ``smp explain``.
* ``timeline/``: measured actions of a training step beside the simulated ones; ``strategy.timeline()``.
* ``memory_report``: measured bytes of all ranks beside the predicted ones; ``strategy.memory_report()``.
* ``memory_tables``: its table.
* ``run_figures``: speed, memory and waiting of a run, from what each rank has counted.
* ``layout_plan``: the fastest layouts of a cluster; ``smp plan``.

``smp_strategy.engine.figures.inspection`` makes the reports of a running model.
"""
