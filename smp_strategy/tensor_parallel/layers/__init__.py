"""Parallel layers: dense layers whose class is replaced in place. In reading order:

* ``base``: ``SplitLayer``, conversion between dense and split; checks of dense layers.
* ``linear``: column- and row-parallel linear layers and convolutions, vocabulary-parallel head.
* ``embedding``: embeddings by rows or by columns; attention weights of some of the heads.

The ``forward`` of column- and row-parallel layers is in ``region``; ``nn.MultiheadAttention`` is in
``plan.torch_layers``. A new layer also needs a style (``plan.plan.Style``) and a line in ``split._split_layer``.
"""
