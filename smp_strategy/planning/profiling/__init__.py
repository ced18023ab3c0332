"""Profiling: measured times and activation bytes of unit calls.

In reading order:

* ``recorded_calls``: unit calls of a dry run, with the metadata of their arguments, replayable without the model.
* ``profiler``: measures each distinct call once on one of the ranks (forward, whole and split backward, saved bytes),
  compares ranks, and shares the results.

The results (:class:`~smp_strategy.model.trace.device_model.Measured`) are equal on all ranks;
``planning/costs`` combines them with modelled costs. The options ``trace_execution_times``, ``trace_memory_usage`` and
``trace_device`` turn measurements on.
"""
