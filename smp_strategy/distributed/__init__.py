"""Distributed runtime: process mesh, watched collectives, messages, and what happens when a rank fails.

Reading order:

* ``mesh_shape``, ``mesh``, ``topology``: rank to coordinates (pure), process groups, ranks per node.
* ``process_groups``: groups beside a default group of any backends.
* ``handle``, ``message_tags``: the handle of everything under way, and all ranges of message tags.
* ``background_call``: a thread for one call, or for one that is repeated.
* ``background_wait``: threads that wait for handles, and forward what has arrived.
* ``host_copies``, ``pinned_pool``: copies between device and host; page-locked memory that is used again.
* ``wait_positions``, ``deadlock``: can a wait ever end (pure); the thread that asks, and breaks off waits.
* ``pending_messages``: messages under way, kept alive with their memory.
* ``shared_arena``: memory that processes of a machine share, and the addresses in it.
* ``device_paths``: calls of NCCL and of the CUDA driver, each behind an interface of its own.
* ``watched_collectives``, ``rendezvous``: collectives of objects, numbers and tensors; calls that all ranks must make.
* ``agreement``: what must be the same on all ranks, how they compare it, and what errors say.
* ``collectives``: collectives of flat buffers (sharding), with an interface and several implementations.
* ``tensor_group``: collectives of split layers, among the ranks of a tensor-parallel group.
* ``door_words``: the calls of Lightning, Accelerate or SageMaker that errors name as a remedy.
* ``peer_processes``: how processes of other ranks of this machine have ended, as long as the system tells it.
* ``failure``, ``shutdown``: first failure on every rank, clean-up at exit.
* ``rng_state``: states of random generators.
* ``device``, ``device_memory``, ``malloc``, ``torch_modes``: differences of devices, memory limits, malloc, modes.
* ``torch_private``: private functions of PyTorch, in one place.
* ``balance``, ``buckets``: greedy balancing (LPT); many small tensors in few messages.
"""
