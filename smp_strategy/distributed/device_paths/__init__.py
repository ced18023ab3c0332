"""Device paths: calls of NCCL and of the CUDA driver, each behind an interface that a test can replace.

The channels that use them are in :mod:`smp_strategy.pipeline.transport.device_channels`.

* ``ordered_edge``: messages that match by their order, as NCCL's do.
* ``device_ipc``: memory and events of a device that another process uses (CUDA IPC).
* ``page_locking``: page-locked memory that several processes share.

None of these has run on an accelerator yet: see ``docs/gpu.md``.
"""
