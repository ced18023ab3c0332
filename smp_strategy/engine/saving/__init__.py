"""Saving and loading, at every door.

* ``checkpointing``, ``pending_state``: the state of modules and optimizers; loaded state that waits for the partition.
* ``checkpoint_content``, ``checkpoint_objects``: checkpoints of one dict, and objects of the run in them.
* ``async_saves``: saves in the background, and what waits for them.
* ``tagged_checkpoints``, ``portable_parts``: checkpoints by tag, in the form of SageMaker's library; parts of state
  dicts as plain objects.
* ``resumable_loader``, ``rank_generators``: a pass over a data loader, whose position can be saved and restored; random
  generators of all ranks in files.
* ``saved_models``: folders of models that other libraries read; ``save_pretrained`` of Hugging Face.
"""
