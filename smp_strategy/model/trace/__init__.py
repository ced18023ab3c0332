"""Dry runs on fake tensors: predict what a call returns, what it costs and what it changes.

In reading order:

* ``tensor_spec.py``, ``pytree.py``: tensor metadata and harmless operations, nested containers,
  objects with tensors inside.
* ``prediction.py``: data types for a callee and its predicted result.
* ``shape_inference.py``: shape propagation through fake tensors, with a cache of predictions.
* ``size_formulas.py``: predictions for new sizes from one symbolic dry run.
* ``fake_call.py``: fake arguments for one call; dispatch mode that answers value-dependent operations.
* ``work.py``, ``flops.py``, ``saved_tensors.py``, ``working_bytes.py``: cost types, FLOP and byte counter, tensors
  saved for backward, ``torch.func`` under saved-tensor hooks, memory beside what is saved.
* ``device_model.py``: roofline model of a device, measured times where there are some.
* ``events.py``: recorded program of one microbatch, the input of planning and routing.
* ``side_effects.py``: mutations of arguments and of context variables, as results of a call.
* ``exposed_attributes.py``: attributes of units that code above them reads, as arguments and results of a call.
* ``object_contents.py``: the same for objects (a key/value cache), which every stage keeps up to date.
* ``snapshot.py``: capture, diff and restore of modules, containers and objects.
* ``user_code.py``: code and objects of the user, told from those of libraries.
* ``places.py``: where the user's code may write to: modules, containers, variables, hooks, context variables.
* ``undo_variables.py``: what dry runs do to variables, iterators and functions under ``functools.lru_cache``.
* ``parametrize_cache.py``: ``parametrize.cached()``.
"""
