"""Dry runs on fake tensors: predict what a call returns, what it costs and what it changes.

In reading order:

* ``tensor_spec.py``, ``pytree.py``, ``opened_objects.py``, ``metadata_ops.py``: tensor metadata, nested containers,
  objects with tensors inside, harmless operations.
* ``prediction.py``: data types for a callee and its predicted result.
* ``shape_inference.py``: shape propagation through fake tensors, with a cache of predictions.
* ``size_formulas.py``, ``symbolic_sizes.py``, ``call_sizes.py``: predictions for new sizes from one symbolic dry run.
* ``fake_call.py``, ``dispatch.py``: fake arguments for one call; dispatch mode that answers value-dependent operations.
* ``work.py``, ``flops.py``, ``saved_tensors.py``: cost types, FLOP and byte counter, tensors saved for backward.
* ``device_model.py``, ``measured_costs.py``: roofline model of a device, measured times where there are some.
* ``events.py``: recorded program of one microbatch, the input of planning and routing.
* ``side_effects.py``, ``context_containers.py``: mutations of arguments and of context variables, as results of a call.
* ``exposed_attributes.py``: attributes of units that code above them reads, as arguments and results of a call.
* ``snapshot.py``, ``past_overrides.py``: capture, diff and restore of modules, containers and objects.
* ``undo_variables.py``, ``undo_iterators.py``, ``memoized.py``, ``user_code.py``: the same for globals, closures,
  iterators and functions under ``functools.lru_cache``.
* ``func_transforms.py``, ``parametrize_cache.py``: ``torch.func`` under saved-tensor hooks; ``parametrize.cached()``.
"""
