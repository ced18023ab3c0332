"""Messages between stages: this package knows no program.

transport              Send and receive between stages: all that the core calls.
channel                Interface: what of a tensor is in its message, and where the rest is. The channel through gloo.
connections            Messages of gloo to another stage, the large ones in pieces on several connections.
wire_format            Layout of a message that has the whole tensor.
place_header           Message that says where a tensor is.
shared_memory_channel  Channel through memory that two ranks of a machine share.
device_channels        Channels between accelerators: NCCL, CUDA IPC, page-locked memory that two ranks share.
open_channels          Choice of the channels, by trying, and their bandwidth. A new channel is made here.

A tensor: ``Transport.send`` -> ``Channel.post`` -> its header -> ``Connections.send`` -> gloo. Calls of drivers and of
the operating system are in :mod:`smp_strategy.distributed` (``device_paths``, ``shared_arena``).
"""
