"""Channels between accelerators. gloo carries their headers, and the elements stay off its sockets.

==================== ==========================================================================================
device_channel       What they have in common: small tensors and those of the host go elsewhere.
message_order        One order of the messages of an edge at both ends, as NCCL needs it.
nccl_channel         The way through NCCL.
slots                Memory that a sender fills again and again, lent and given back without a wait.
slot_channel         The way through slots.
slot_memories        Slots in page-locked memory that both ranks share, and in memory of the device (CUDA IPC).
paths                The paths, each with the ranks that it is possible between.
probe                Trial of a path: patterns that arrive, or a reason.
==================== ==========================================================================================

A header may arrive before the device has computed the value, so the host runs ahead on both sides. All waits on devices
are then for work that was queued *causally before* the wait: a header follows the record of its event, a wait follows
the header, and streams are filled in the order of the host. So these waits have no cycle, whatever the streams or the
queues of the hardware share. NCCL is the exception: a send also waits for its receive. Therefore an edge of NCCL has a
stream of its own, and its receives are queued by a thread that waits for nothing else.
"""
