"""SageMaker's model parallel library: its functions, on this package's engine, as ``smp_strategy.smp``.

Reading order::

    initialize.py, run_state.py            smp.init; the one run of a process, smp.state
    sm_variables.py                        variables of SageMaker's containers, ranks under mpirun
    rank_calls.py                          ranks, groups, and messages between ranks
    step_function.py, step_inputs.py       @smp.step: the engine's step; what is cut into microbatches
    same_batches.py                        ranks of a replica that read different batches
    step_output.py, own_outputs.py         StepOutput; outputs of a rank's own samples
    distributed_model.py, model_parts.py   smp.DistributedModel; what this rank holds of a model
    distributed_optimizer.py               smp.DistributedOptimizer, loss scaling
    unwrapped_calls.py, comm_hooks.py      PyTorch's clipping and optimizers; hooks of DistributedDataParallel
    model_state.py, save_and_load.py       state dicts, whole or in parts; smp.save and smp.load
    checkpoint_calls.py                    smp.save_checkpoint and smp.resume_from_checkpoint
    creation.py                            contexts for models that are being created; smp.checkpoint
    run_script.py, names/                  smp run: scripts under the library's own names
    nn/, amp.py, optimizers.py             layers, gradient scaler, optimizers
"""
