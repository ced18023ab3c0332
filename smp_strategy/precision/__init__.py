"""Mixed precision: dtypes of computation, float32 masters and gradients, loss scaling. In reading order:

* ``dtypes``: table of which numbers have which dtype, from the options.
* ``mixed_precision``: units compute on half-precision copies of float32 masters, and get arguments in their dtype.
* ``master_weights``: parameters without masters are refused; gradients in float32.
* ``loss_scale``: rules by which the scale grows and shrinks; pure functions.
* ``grad_scaler``: PyTorch's ``GradScaler`` interface, in agreement over all ranks.

The options are in ``config.precision_options``; the check of gradients over all ranks is in
``data_parallel.grad_norm``.
"""
