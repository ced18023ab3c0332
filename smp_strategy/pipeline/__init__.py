"""Pipeline parallelism: runs the user's unmodified program on every stage, call by call.

The search for a plan is in :mod:`smp_strategy.planning`. The core, in reading order:

==================== ==========================================================================================
placed_tensor        Tensor subclass with values on one stage and metadata on all; what the user's code sees.
interpreter          Each call in four moves: predict, record and route, exchange, run.
routing              Rule that places events on stages; [Note: segments].
program_trace        Events of a microbatch, with their stages; [Note: following a trace].
local_graph          Real tensors of a microbatch on a stage, cut at segment borders.
segments             Imports and exports at the cuts of the autograd graph.
backward             Backward of a microbatch, segment by segment.
microbatch_runner    Runs the microbatches of a step in turns.
runtime              Runs steps in the order of a plan; replaces the forward of units.
coroutine            A microbatch's program, paused while it waits, and its thread.
stage                This rank's stage: services that its programs share.
schedule             Plan: actions of each stage, with a text form.
==================== ==========================================================================================

What the core uses:

==================== ==========================================================================================
placed_ops           Tables of operations on placed tensors: reads of values, refused ones.
outcome              Check of a call's result against its prediction.
unpredictable        Calls with data-dependent results.
split_backward       Input gradients first, formulas of weight gradients later; [Note: split backward].
repeated_uses        Backward that casts the gradients of weights which it reaches on several ways.
microbatch           Splitting of a batch into microbatches.
job                  A step to be run, and its result.
current_program      Holder of the running program.
action_order         Order without a plan; properties of an order.
recorder             Measures every action.
recording            Measured times of a step.
==================== ==========================================================================================

Steps off the main path, and the end of a step:

==================== ==========================================================================================
off_plan             A microbatch takes another path; [Note: no deadlock off the plan].
barriers             Actions once per batch, as in manual optimization.
surveys              Dry runs, and hooks outside of steps.
step_end             Comparison of the programs of all stages, then broadcast of the results.
results              Placed tensors become real on all stages.
==================== ==========================================================================================

Special cases, each in a package with a map of its own; they do not know each other:

==================== ==========================================================================================
transport            Messages between stages: this package knows no program.
isolation            Isolation of interleaved microbatches: what one writes, others do not find; and random numbers.
shared_tensors       Tensors of the glue that stages share or keep, and in-place changes of them.
wrapping             Around a unit, and code that bypasses it.
dist_calls           Collectives of the user, in a step.
batch_loss           The loss of the batch, from the losses of its microbatches.
==================== ==========================================================================================
"""
