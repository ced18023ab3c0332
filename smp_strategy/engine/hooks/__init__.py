"""Hooks of the user see the full model, as in a single process, whichever ranks hold its values.

In reading order:

* ``run_hook.py``: runs a hook with a view.
* ``views.py``: the view of the hook that runs now; chooses one of the two kinds below.
* ``full_parameters.py``: a single stage: sharded and split parameters are gathered on first use.
* ``cross_stage.py``: several stages: operations on parameters run on the stages that hold them.
* ``cross_stage_inference.py``: metadata of results on the stages that do not compute them.

Weights, gradients, buffers and the state of optimizers are visible; calls of the model run on their stages. Every rank
runs the hook, and an error on all ranks tells if they do not run the same code.
"""
