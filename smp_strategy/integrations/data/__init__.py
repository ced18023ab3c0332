"""Data loading shared by the Lightning and Accelerate integrations.

Reading order (the first two are in :mod:`smp_strategy.distributed`)::

    rng_state.py          capture and restore the global generators of a process
    rng_sync.py           LoaderState and DataReaders: ranks that read the same samples draw the same numbers
    resumable_loader.py   LoaderPass: a pass over a loader, whose position can be saved and restored

Users of these::

    integrations/lightning/data.py     loaders of Lightning's Trainer
    integrations/accelerate/data.py    loaders that ``Accelerator.prepare`` has sharded over replicas
"""
