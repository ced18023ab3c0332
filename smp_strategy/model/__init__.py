"""The user's model: units, ownership, guarded tensors, batches, random streams and initial values; traces of calls.

In reading order:

* ``units.py``: partition a module into units, the smallest parts that a stage can hold.
* ``annotations.py``: ``set_partition`` and ``partition``, the user's marks on modules.
* ``ownership.py``: which stages hold which parameters and buffers; frees the others, and guards them.
* ``guarded_tensors.py``: tensors without values: metadata is answered, a use waits for values or is refused.
* ``patching.py``: temporary replacement of methods of single modules.
* ``padded_encoder.py``: ``nn.TransformerEncoder`` with a padding mask, without nested tensors.
* ``compiled_code.py``: functions that PyTorch's compiler leaves alone.
* ``shard_layout.py``: the elements of a tensor that a rank holds: runs, rectangles, cuts.
* ``parameter_parts.py``: parts of parameters that tensor parallelism splits, joined and cut.
* ``samples.py``: batch dimension inference: number of samples, lists with one entry per sample.
* ``rng.py``: seeds and random streams that do not depend on the layout.
* ``deferred_tensor.py``: tensors whose values are in a file and are read at the first use.
* ``deferred_memory.py``: memory of such tensors: values when needed, noted changes, views.
* ``initial_values.py``: layout-independent initialisation of models that were built on the meta device, in place, with
  the identity of each tensor kept.
* ``weight_gradient_formula.py``: marks autograd Functions whose weight gradient can be deferred.
* ``trace/``: dry runs of calls on fake tensors: results by metadata, costs, side effects.
"""
