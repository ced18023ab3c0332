"""Tensor parallelism: layers of a module split over the ranks of a group, in place. In reading order:

* ``autograd_collectives``: collectives of a ``TensorGroup`` (in ``distributed``) with gradients; the algebra of
  whole, split and summand.
* ``region``: column- and row-parallel layers, the ends of a split region; one gradient sum for all readers of an input.
* ``region_rng``: random numbers that differ between ranks inside a region.
* ``layers/``: linear, convolution, embedding, attention.
* ``sharded_tensor/``: ``SplitTensor``, which code uses as if it were whole.
* ``sequence_parallel``: the residual stream split by tokens or samples.
* ``plan/``: which layers are split how, from the model and from the user.
* ``split``: makes the decision and carries it out; start here.
* ``split_module``: the split layers during a run, as the engine uses them.
* ``joint_batch``: batches of a group's ranks gathered into one.
"""
