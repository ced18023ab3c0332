"""Configuration: options, their validation, and their text forms.

In reading order:

* ``config``: :class:`~smp_strategy.config.config.SMPConfig`, all options in one frozen dataclass;
  contradictions.
* ``variables``: options from environment variables, aliases, variables of other programs.
* ``sagemaker_options``: a configuration of SageMaker's library as options; its keys and values.
* ``options``: options by concern: pipeline, partition, tracing, units, sharding, tensor parallelism.
* ``activation_options``: activation checkpointing and offload.
* ``precision_options``: compute and reduction dtypes, loss scaling.
* ``foreign_words``: words of other libraries for options and their values, for errors.
* ``option_signature``: signatures and docstrings with every option.
* ``keywords``: the same for type checkers and editors, generated.
* ``parsing``: type checks of values, and values from text.
* ``recipe``: options as one short word: ``pp4_zbv_mb16``.
* ``degree_check``: whether degrees fit the number of ranks and of units.
* ``sizes``: amounts as text: ``16GiB``, ``12.3 ms``.
* ``mpi_variables``: ranks that ``mpirun`` gives.
* ``special_paths``: working directory in which the script was started; devices and FIFOs, which no save replaces.

Nothing here imports torch, because Hydra reads the options while it composes a configuration.
"""
