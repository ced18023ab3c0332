"""Reports of an engine: its plan, the figures of its steps, and notes on numbers that microbatches change.

* ``inspection``: reports on demand.
* ``startup_report``, ``first_step_report``: once at the start, and at the end of the first training step.
* ``step_monitor``, ``nonfinite``: figures of a run, and the search for NaN and infinity, if somebody asks.
* ``microbatch_notes``: layers and losses whose numbers depend on how a batch is cut.
"""
