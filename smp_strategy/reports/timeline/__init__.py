"""Timeline of a training step: measured actions of all stages beside the simulated schedule.

In reading order:

* ``timeline``: the report; text, Chrome trace and HTML.
* ``clocks``: recordings of all stages on one clock, gathered on every rank of a replica.
* ``comparison``: breakdown of each stage's time, and measured over predicted times by kind of action.
* ``text``: plain text with lanes and tables.
* ``page``: HTML page with a Gantt chart.
* ``chrome_trace``: JSON for Perfetto and chrome://tracing.

``smp_strategy.pipeline.recording`` records the actions of every step.
"""
