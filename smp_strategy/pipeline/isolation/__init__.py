"""Isolation of interleaved microbatches: what one writes, others do not find; and random numbers.

microbatch_state  Values in shared objects, swapped per turn.
written_values    What these values contain, and which microbatches find them; [Note: isolation].
torch_switches    ``requires_grad`` and process-wide settings of PyTorch.
writes            Detection of writes to attributes and buffers.
carried_objects   Objects that units change and get again: stages compare their calls.
rehearsal         Dry run of several microbatches, which shows whether they hand state on.
draws             Random streams of a program.
global_rng        Global generators, synchronised over the stages.
"""
