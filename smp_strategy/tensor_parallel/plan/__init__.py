"""Plan of a split: which layers are split how. Sources in order of precedence, and what joins them. In reading order:

* ``plan``: ``LayerBlock`` and ``SplitKind``, plain data; checks of sizes and heads; the report with reasons.
* ``user_choices``: the user's option, styles by name pattern; modules that the user includes or excludes.
* ``registry``: the user's classes with a split twin, ``tp_register``.
* ``hugging_face``: table of known models, and the models' own plans.
* ``torch_layers``: PyTorch's attention and transformer layers.
* ``observed_pairs``: pairs of linear layers found by observing one step.
* ``resolve``: one consistent decision from all of these; hooks that would see parts.
"""
