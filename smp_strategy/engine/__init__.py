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
* ``delayed_init.py``, ``pretrained.py``: modules on the meta device; memory and values for this rank's share only, also
  for ``from_pretrained`` of Hugging Face.
* ``local_model.py``, ``take_holdings.py``: this rank's parameters: passes, gradients, optimizer updates, saving,
  restoring; the making of its shards.
* ``unit_calls.py``: interception of unit calls, which the runtime of :mod:`smp_strategy.pipeline` answers.
* ``new_step_kinds.py``, ``carried_state.py``: the first step of each kind: the tensors that it uses, reasons to refuse
  it, and state that its microbatches hand on.
* ``run_step.py``, ``plan_cache.py``: every step: its microbatches, its job and its schedule; the cache of schedules.
* ``loss_weighting.py``: in which steps terms of the loss count with their numbers of elements.
* ``join_results.py``, ``batch_changes.py``, ``own_samples.py``, ``data_ranks.py``: results of microbatches as those of
  the batch; changes that they make to it; a rank's own samples; gathering and reducing over ranks that read such.
* ``data_readers.py``: random draws of ranks that read the same samples.
* ``rank_group.py``: values that ranks exchange outside of steps.
* ``module_marks.py``: marks of users on modules.
* ``step_results.py``, ``deferred_loss.py``, ``manual_optimization.py``: outputs and gradients of a step whose backward
  comes later, whose loss the caller computes, or that runs backward itself.
* ``repeated_step.py``: the state before a step, for running it once more in another way.
* ``run_outcome.py``: errors that have ended steps and updates, which decide what may come next.
* ``own_parameters.py``: tensors that optimizers train and the module does not have.
* ``active_engines.py``, ``left_sharded.py``: engines of this process; modules that a run has left sharded.

Rooms, each with a map of its own; what doors need of the library they find here:

* ``model_calls/``: calls of a model by a loop that belongs to the script.
* ``updates/``: steps of optimizers, and loss scaling in agreement over all ranks.
* ``hooks/``: the user's hooks see the full model.
* ``saving/``: states, checkpoints, folders for other libraries, positions in data, random generators.
* ``lifecycle/``: from the first meeting of the ranks to their end.
* ``figures/``: reports, figures of steps, notes on numbers.
* ``commands/``: commands of ``smp`` that plan, measure or look.
"""
