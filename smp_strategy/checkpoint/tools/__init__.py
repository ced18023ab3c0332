"""The commands of ``smp`` on checkpoints; :mod:`smp_strategy.cli` parses their arguments.

========== ============================================================================================================
inspect    ``smp inspect``: content, layout and digests of a checkpoint.
verify     ``smp verify``: compares every byte with the digests; exit status 0 intact, 1 damaged, 2 unknown.
export     ``smp export``: safetensors, a folder for ``from_pretrained``, or the other one of our two forms.
import_    ``smp import``: makes a checkpoint of ours from another program's.
========== ============================================================================================================

No command needs ranks or a GPU, and none runs code of a file.
"""
