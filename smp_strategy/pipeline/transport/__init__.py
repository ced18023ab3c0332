"""Messages between stages: this package knows no program.

transport              Send and receive between stages.
wire_format            Tensors as messages.
connections            Messages over gloo, the large ones in pieces on several connections.
channel                Interface of the ways between stages; the way through gloo.
shared_memory_channel  The way through memory that two ranks of a machine share.
place_header           Header that says where a tensor is.
open_channels          Choice of the channels, by trying, and their bandwidth.
device_channels        Ways between accelerators: NCCL, CUDA IPC, page-locked memory that two ranks share.
"""
