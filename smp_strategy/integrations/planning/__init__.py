"""Commands that plan a job on a laptop: no process group, no weights.

* ``plan_command``: ``smp plan`` and ``smp estimate``.
* ``models``: the model, its step and its batch, from a configuration of Hugging Face or a function.
"""
