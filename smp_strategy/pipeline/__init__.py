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
transport            Send and receive between stages.
schedule             Plan: actions of each stage, with a text form.
==================== ==========================================================================================

What the core uses:

==================== ==========================================================================================
placed_ops           Tables of operations on placed tensors: reads of values, refused ones.
outcome              Check of a call's result against its prediction.
split_backward       Input gradients first, formulas of weight gradients later; [Note: split backward].
repeated_uses        Backward that casts the gradients of weights which it reaches on several ways.
microbatch           Splitting of a batch into microbatches.
job                  A step to be run, and its result.
current_program      Holder of the running program.
wire_format          Tensors as messages.
connections          Messages over gloo, the large ones in pieces on several connections.
channel              Interface of the ways between stages; the way through gloo.
shared_memory_channel  The way through memory that two ranks of a machine share.
place_header         Header that says where a tensor is.
device_channels      Ways between accelerators: NCCL, CUDA IPC, page-locked memory that two ranks share.
open_channels        Choice of the channels, by trying, and their bandwidth.
action_order         Order without a plan; properties of an order.
recorder             Measures every action.
recording            Measured times of a step.
==================== ==========================================================================================

Special cases. Results that are unpredictable, and tensors that are shared or kept:

==================== ==========================================================================================
unpredictable        Calls with data-dependent results.
arguments            Preparation of call arguments.
tensor_memory        Memory of placed tensors, and its in-place changes.
aliasing             In-place changes of placed tensors, also through views.
replicated_tensors   In-place changes of tensors that every stage has.
kept_tensors         Placed tensors that outlive their step.
glue_parameters      Parameters of units that code above the units uses.
==================== ==========================================================================================

Around a unit, and code that bypasses it:

==================== ==========================================================================================
wrap_unit            Wrappers around a unit's forward; [Note: wrapping order]. Calls outside of a program.
module_hooks         Hooks that must run on the unit's stage.
autograd_functions   Custom autograd Functions and checkpoints in the glue.
inner_gradients      ``torch.autograd.grad`` in the glue.
==================== ==========================================================================================

Isolation of interleaved microbatches:

==================== ==========================================================================================
microbatch_state     Values in shared objects, swapped per turn.
isolation            What these values contain, and which microbatches find them; [Note: isolation].
torch_switches       ``requires_grad`` and process-wide settings of PyTorch.
writes               Detection of writes to attributes and buffers.
carried_objects      Objects that units change and get again: stages compare their calls.
rehearsal            Dry run of several microbatches, which shows whether they hand state on.
==================== ==========================================================================================

Random numbers:

==================== ==========================================================================================
draws                Random streams of a program.
global_rng           Global generators, synchronised over the stages.
==================== ==========================================================================================

Steps off the main path:

==================== ==========================================================================================
off_plan             A microbatch takes another path; [Note: no deadlock off the plan].
barriers             Actions once per batch, as in manual optimization.
surveys              Dry runs, and hooks outside of steps.
==================== ==========================================================================================

Collectives of the user:

==================== ==========================================================================================
user_collectives     Redirection to the replicas; [Note: collectives mean replicas].
collective_results   Results without communication.
process_counts       Numbers of processes outside of ``torch.distributed``.
==================== ==========================================================================================

The loss of the batch:

==================== ==========================================================================================
loss_weights         Terms of the losses of a step, with weights by their numbers of elements.
loss_terms           Which calls are such terms.
batch_record         What a program computes from its batch, to be repeated for other microbatches.
batch_facts          How tensors of the batch cover its samples.
sample_watch         Finds losses that compare the samples of a batch, in the dry run.
sample_spread        Where the samples are in a tensor of the glue, and operations that mix them.
==================== ==========================================================================================

End of a step:

==================== ==========================================================================================
step_end             Comparison of the programs of all stages, then broadcast of the results.
results              Placed tensors become real on all stages.
join_results         Merging of the microbatches' results.
==================== ==========================================================================================
"""
