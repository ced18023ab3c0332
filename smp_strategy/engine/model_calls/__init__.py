"""Calls of a model by a loop that belongs to the script: each call is a step, also if its loss is computed later.

Reading order::

    model_calls.py    the model's ``forward`` is replaced: forward, or forward and backward, of all microbatches
    model_inputs.py   inputs that need gradients; numbers of items, of which a microbatch gets its share
    model_outputs.py  results of the batch, and the gradients that backward of the script brings to them
    loss_use.py       which results a script trains on, which its first backward tells
    model_methods.py  other public methods of the model that call its units
    lent_weights.py   weights that the script reads between steps
"""
