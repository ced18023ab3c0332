"""Saving and loading: every tensor under its plain name and in its whole shape, whatever layout wrote it.

In reading order:

==================== ==================================================================================================
state_dict           Sharded state dicts of module, optimizers and gradients: names, whole shapes, local rectangles.
storage              The files: sharded folders and full files, with digests, replaced atomically.
load                 Each rank loads its shards from a source: a folder, or a state in memory.
sources              Sources in memory: full state dicts, loaded ones that hooks have edited; tensors of a folder.
spread_state         Whole tensors from the ranks' shards, one at a time, for memory and for files; safetensors.
torch_file           The place of a whole tensor in a file of ``torch.save``.
full_state_dict      Full state dicts as a single process has them; takes shares of full state.
restore_module       Gives every rank the whole module back at the end of a run.
convert              Other formats: read and write them (SageMaker, safetensors, Hugging Face, DCP, torch.save).
tools                The commands ``smp inspect``, ``verify``, ``export``, ``import``.
==================== ==================================================================================================

Cuts, runs and rectangles are defined in :mod:`smp_strategy.model.shard_layout`; the user's view is in
``docs/checkpoints.md``, ``docs/resume.md`` and ``docs/checkpoint-tools.md``.
"""
