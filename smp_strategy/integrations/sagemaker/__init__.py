"""SageMaker's model parallel library: its functions, on this package's engine, as ``smp_strategy.smp``.

Reading order::

    initialize.py, run_state.py            smp.init, SageMaker's containers, PyTorch's clipping; smp.state
    rank_calls.py                          ranks, groups, messages between ranks; smp.save and smp.load
    step_function.py                       @smp.step: the engine's step
    step_values.py                         what is cut into microbatches, and compared; StepOutput
    distributed_model.py                   smp.DistributedModel
    distributed_optimizer.py               smp.DistributedOptimizer, loss scaling
    model_state.py                         what this rank holds of a model; state dicts, whole or in parts
    creation.py                            contexts for models that are being created; smp.checkpoint
    run_script.py, names/                  smp run: scripts under the library's own names
    nn/, amp.py, optimizers.py             layers, gradient scaler, optimizers
"""
