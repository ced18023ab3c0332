"""The engine: attaches to a module, parallelizes it in the first step, runs every step, and gives the module back.

It is the one place that knows every part of the package. In reading order:

* ``engine.py``: the facade that front doors call: attach, steps, gradients, optimizer updates, state, detach.
* ``engine_parts.py``: the parts of an engine, shared with its reports and its saved state.
* ``first_attach.py``, ``degrees.py``, ``given_partition.py``: before the first step: equal initial values on all ranks,
  mesh and units, degrees of the mesh axes, the user's decisions on the partition.
* ``parallelize.py``, ``layout.py``: the first step, in order: split layers, decide the partition, free the values of
  other ranks, make the runtime; the decisions, which later runs keep.
* ``dry_run.py``, ``decide.py``: trace the step without computing; from the trace to a partition.
* ``written_weights.py``: parameters that steps write to, which dry runs put back.
* ``pretrained.py``: ``from_pretrained`` of Hugging Face under delayed initialisation.
* ``delayed_init.py``: modules on the meta device; memory and values for this rank's share only.
* ``local_model.py``, ``take_holdings.py``: this rank's parameters: passes, gradients, optimizer updates, saving,
  restoring; the making of its shards.
* ``unit_calls.py``: interception of unit calls, which the runtime of :mod:`smp_strategy.pipeline` answers.
* ``new_step_kinds.py``, ``carried_state.py``: the first step of each kind: the tensors that it uses, reasons to refuse
  it, and state that its microbatches hand on.
* ``run_step.py``, ``plan_cache.py``: every step: its microbatches, its job and its schedule; the cache of schedules.
* ``loss_weighting.py``: in which steps terms of the loss count with their numbers of elements.
* ``optimizer_steps.py``, ``grad_scaler.py``, ``loss_scale.py``: steps of optimizers, and loss scaling in agreement over
  all ranks, as all doors make them.
* ``join_results.py``, ``own_samples.py``: merging of the results of microbatches; those of a rank's own samples.
* ``step_results.py``, ``deferred_loss.py``, ``manual_optimization.py``: outputs and gradients of a step whose backward
  comes later, whose loss the caller computes, or that runs backward itself.
* ``repeated_step.py``: the state before a step, for running it once more in another way.
* ``run_outcome.py``: errors that have ended steps and updates, which decide what may come next.
* ``own_parameters.py``: tensors that optimizers train and the module does not have.
* ``hooks/``: the user's hooks see the full model.
* ``checkpointing.py``, ``pending_state.py``: saving and loading; loaded state that waits for the partition.
* ``checkpoint_content.py``, ``checkpoint_objects.py``, ``async_saves.py``: checkpoints of one dict, and objects of the
  run in them; saves in the background, and what waits for them.
* ``tagged_checkpoints.py``, ``portable_parts.py``: checkpoints by tag, in the form of SageMaker's library; parts of
  state dicts as plain objects.
* ``model_calls/``: calls of a model by a loop that belongs to the script.
* ``saved_models/``: folders of models that other libraries read; ``save_pretrained`` of Hugging Face.
* ``resumable_loader.py``, ``rank_generators.py``: a pass over a data loader, whose position can be saved and restored;
  random generators of all ranks in files.
* ``data_ranks.py``: gathering and reducing over ranks that read samples of their own.
* ``main_process_calls.py``: other ranks take part in what only the main process calls.
* ``first_meeting.py``, ``run_lifecycle.py``, ``crash_report.py``: ranks meet before there is a process group, compare
  settings, and begin a run; clean-up at exit; short tracebacks, one for the first failure.
* ``inspection.py``, ``startup_report.py``, ``first_step_report.py``: reports on demand, once at the start, and at the
  end of the first training step.
* ``step_monitor.py``, ``nonfinite.py``: figures of a run, and the search for NaN and infinity, if somebody asks.
* ``microbatch_notes.py``: layers and losses whose numbers depend on how a batch is cut.
* ``active_engines.py``, ``left_sharded.py``: engines of this process; modules that a run has left sharded.
* ``offline_planning.py``, ``layout_planning.py``: a partition without ranks and without memory; the fastest layouts of
  a cluster.
* ``profiling_run.py``: ``smp profile``: a run that measures units, writes the partition, and ends.
* ``plan_command.py``: ``smp plan`` and ``smp estimate``.
* ``doctor.py``: ``smp doctor``: this machine, its transports, and what works here.
"""
