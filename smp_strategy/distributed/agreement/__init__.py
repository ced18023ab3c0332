"""Agreement: what must be the same on all ranks, how they compare it, and the errors that tell of a difference.

In reading order:

* ``topics``: everything that ranks must have alike, with the errors. Add a new one there.
* ``ledger``: ranks note values under topics; one small message compares all that was noted since the last one.
* ``common_settings``: settings of an optimizer, and the error about settings that differ.
* ``same_inputs``: digests of inputs, which ranks of a replica compare when a step begins.

When ranks compare:

==================== ======================= ==================================================================
topic                ranks                   when
==================== ======================= ==================================================================
settings             all                     first meeting; begin of a run; first step; ``prepare``; ``smp.init``
meta tensors, model  all                     a module is attached
split layers         tensor-parallel group   before layers are split
inputs               replica                 a step begins, before the first message of an earlier stage
inputs of calls      stages of a replica     with the program; split layers: the next step, a save, the end
program              stages of a replica     a step or hook ends; in the background
arguments of units   stages of a replica     with the program
update               all                     in the background; Lightning: with the signal flag of the next step
number of batches    tensor-parallel group   a pass over a loader begins, and at each batch
==================== ======================= ==================================================================

Ranks that are in different calls are another matter: :mod:`smp_strategy.distributed.watched_collectives` notices that,
and :mod:`smp_strategy.distributed.deadlock` the waits that follow from it.
"""
