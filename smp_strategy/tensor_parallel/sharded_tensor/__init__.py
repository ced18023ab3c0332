"""``SplitTensor``: a tensor in parts over a tensor-parallel group, used as if it were whole. In reading order:

* ``tensor``: the class, its metadata, hooks and gradients.
* ``parts``: its part, and the border between the autograd graphs.
* ``operations``: dispatch: on each part, with a small exchange, or after gathering.
* ``shapes``: rules for operations that are local to parts; pure functions.
* ``cross_entropy``: vocabulary-parallel loss and argmax.
"""
