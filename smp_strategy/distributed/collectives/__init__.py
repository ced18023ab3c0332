"""Collectives of flat buffers: all-gather, reduce-scatter and all-reduce by the best way for the ranks' links.

Other collectives: of objects, numbers and single tensors in ``watched_collectives``, of split layers in
``tensor_group``, those that users call in a step in :mod:`smp_strategy.pipeline.dist_calls`.

Reading order:

* ``interface``: the protocols ``Collectives`` and ``JoinedSums``, the choice of an implementation, NCCL's.
* ``messages``: point-to-point messages of gloo, each with a tag of its own, as a handle.
* ``direct``: gather and reduce in one hop, adding in the order of the ranks.
* ``shared_memory_hop``: the same through shared memory of the ranks of a node.
* ``hierarchical``: gather and reduce in two hops, between nodes and inside them.
* ``interleaved``: several collectives at a time, step by step in a relay's thread.
* ``gloo``: the implementation over messages, out of the five above; all-reduces in one or two hops.
* ``fusion_buffers``: sums of tensors of any size as all-reduces of one size.
* ``shared_memory_sums``: sums of tensors in memory that all ranks of a node share.
* ``host_staged``: the same for buffers of an accelerator that ranks share.
"""
