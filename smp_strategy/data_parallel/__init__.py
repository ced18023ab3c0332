"""Data parallelism: gradient averages over replicas, ZeRO-1, and sharding over groups of ranks (ZeRO-3/FSDP, MiCS).

Reading order:

* ``reduction``: when gradients are summed over stages and replicas; the entry point.
* ``bucketed_all_reduce``: sums in buckets, and sums of gradient shards over the replicas of a shard group, overlapped
  with backward.
* ``gradient_sums``: sums after backward, sums of sparse gradients, the choice of the way by the replicas' places.
* ``ddp_comm_hook``: the hierarchical sums, as a hook of PyTorch's DistributedDataParallel.
* ``buffer_sync``: all replicas take over the buffers of the first.
* ``zero1``: one owner per parameter; updated values that arrive during the next forward.
* ``flat_layout``: elements of each parameter on each rank (pure).
* ``parameter_pieces``: class of a parameter without values; gradient of which a rank has a piece; views of runs.
* ``flat_buffer``, ``flat_gradients``: life of the values of some parameters, and of their gradients.
* ``flat_unit``: the buffers of a unit.
* ``backward_tracking``: calls that a backward needs; weights that autograd has saved.
* ``collective_order``, ``gather_schedule``: one order of collectives for all ranks; when units are gathered and freed.
* ``sharded_module``: all units of a stage, as the engine uses them.
* ``grad_norm``: global norm; loss scale and overflow.
* ``optimizer_probe``, ``optimizer_checks``, ``optimizer_dependence``: twins; do pieces or subsets suffice.
* ``optimizer_state``: state of pieces, full state in hooks, hooks of steps.
"""
