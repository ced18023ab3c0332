"""Mixed precision: dtypes of computation, float32 masters and gradients. In reading order:

* ``dtypes``: table of which numbers have which dtype, from the options.
* ``mixed_precision``: units compute on half-precision copies of float32 masters, and get arguments in their dtype.
* ``master_weights``: parameters without masters are refused; gradients in float32.

The options are in ``config.precision_options``; loss scaling is in ``engine.grad_scaler``, and the check of gradients
over all ranks in ``data_parallel.grad_norm``.
"""
