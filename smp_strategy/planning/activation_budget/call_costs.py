"""Cost of recomputing or offloading the activations of a unit call: seconds added, bytes kept, recomputed and copied.

Recomputation counts as input gradient, because passes that wait for input gradients wait for it as well; so does the
whole backward of a recomputed unit, which is never split. A measured forward sets the scale: the recomputed part takes
the same share of it as of the modelled one. Copies to host memory take time of their own on a CPU; on an accelerator
they overlap with compute, as far as there is enough. So does the Python that runs per kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

from smp_strategy.activations.policy import KEEP, ActivationPolicies, ActivationPolicy
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.work import Work

__all__ = ["CallCosts", "call_costs", "treated"]

# Python overhead per recomputed kernel, and per kernel that is intercepted to keep products; a core at 3 GHz.
REPEAT_SECONDS = 3e-6
WATCH_SECONDS = 15e-6


@final
class CallCosts(NamedTuple):
    """Costs of one call."""

    saved_bytes: int
    """Bytes on the device from forward to backward."""
    again_bytes: int = 0
    """Recomputed bytes, on the device during its backward."""
    offloaded_bytes: int = 0
    """Bytes in host memory from forward to backward."""
    again_seconds: float = 0.0
    """Seconds of recomputation."""
    copy_seconds: float = 0.0
    """Seconds of copies that do not overlap with compute, each way."""


def call_costs(event: Event, policy: ActivationPolicy, work: Work, machine: Machine, min_bytes: int = 0) -> CallCosts:
    """Costs of a call under a choice of recomputation and offload.

    Args:
        event: Event of the call.
        policy: Choice for its unit.
        work: Work of the call if it keeps everything.
        machine: Performance model.
        min_bytes: Size from which tensors are offloaded.
    """
    if policy.is_default or not event.saved_bytes:
        return CallCosts(event.saved_bytes)
    kept = event.kept
    if not kept.memories and policy.recompute != "no":
        # Saved tensors were not recorded: assume that inputs stay and everything is recomputed.
        inputs = sum(value.nbytes for value in event.inputs)
        return CallCosts(inputs, event.saved_bytes, 0, work.forward)
    stays, leaves, again_bytes, again_seconds = 0, 0, 0, 0.0
    if policy.recompute == "no":
        mine = [memory for memory in kept.memories if memory.is_saved]
        # Measured bytes may differ from those of the dry run.
        stays = event.saved_bytes - sum(memory.nbytes for memory in mine)
    else:
        origins = ("input",) if policy.recompute == "all" else ("input", "product")
        mine = [memory for memory in kept.memories if memory.origin in origins]
        again_bytes = max(0, event.saved_bytes - kept.nbytes(origins=origins, saved_only=True))
        effort = kept.again if policy.recompute == "all" else kept.cheap
        modelled = machine.seconds(event.effort.forward)
        again_seconds = work.forward * min(1.0, machine.seconds(effort) / modelled) if modelled else work.forward
        python = kept.again.kernels * (REPEAT_SECONDS if policy.recompute == "all" else WATCH_SECONDS)
        again_seconds += max(0.0, python - work.forward) if machine.host.is_beside else python
    if policy.offload:
        # A recomputed call offloads its inputs and keeps products on the device.
        leaving = [memory for memory in mine if policy.recompute == "no" or memory.origin == "input"]
        leaves = sum(memory.nbytes for memory in leaving if memory.nbytes >= min_bytes)
    stays = max(0, stays + sum(memory.nbytes for memory in mine) - leaves)
    copy_seconds = 0.0 if machine.host.is_beside else leaves / machine.host.bytes_per_second
    return CallCosts(stays, again_bytes, leaves, again_seconds, copy_seconds)


def treated(
    trace: Trace,
    work: Mapping[int, Work],
    activation_policies: ActivationPolicies,
    stage_of: Mapping[str, int],
    *,
    machine: Machine,
    min_bytes: int = 0,
) -> tuple[Trace, dict[int, Work]]:
    """Events of a microbatch and their work, with recomputation and offload applied.

    Args:
        trace: Trace of the microbatch if units keep everything.
        work: Work of its events.
        activation_policies: Choices by unit; units without one keep everything.
        stage_of: Stage of each unit; units are recomputed together only within a stage.
        machine: Performance model.
        min_bytes: Size from which tensors are offloaded.
    """
    if all(policy.is_default for policy in activation_policies.values()):
        return trace, dict(work)
    events, times = list(trace.events), dict(work)
    for position, event in enumerate(trace.events):
        policy = activation_policies.get(event.name, KEEP)
        if event.kind != "unit" or policy.is_default:
            continue
        mine = work.get(position, Work())
        costs = call_costs(event, policy, mine, machine, min_bytes)
        events[position] = event._replace(
            saved_bytes=costs.saved_bytes, again_bytes=costs.again_bytes, offloaded_bytes=costs.offloaded_bytes
        )
        times[position] = _with(mine, costs, is_whole=policy.recompute != "no")
    for group in _groups(trace.events, activation_policies, stage_of):
        _compute_together(events, trace.events, group)
    return replace(trace, events=events), times


def _with(work: Work, costs: CallCosts, *, is_whole: bool) -> Work:
    again = costs.again_seconds + costs.copy_seconds
    if is_whole:
        gradients = (work.backward + again, 0.0)
    elif work.input_gradient:
        gradients = (work.input_gradient + again, work.weight_gradient)
    else:  # no input gradient
        gradients = (0.0, work.weight_gradient + again)
    return Work(work.forward + costs.copy_seconds, *gradients)


def _groups(
    events: Sequence[Event], activation_policies: ActivationPolicies, stage_of: Mapping[str, int]
) -> list[list[int]]:
    """Positions of calls that are recomputed together: calls of siblings that follow each other on a stage."""
    groups: list[list[int]] = []
    for position, event in enumerate(events):
        policy = activation_policies.get(event.name, KEEP)
        if event.kind != "unit" or policy.recompute == "no" or policy.group == 1:
            continue
        last = groups[-1] if groups else []
        if last and (policy.group is None or len(last) < policy.group) and _follows(events, last[-1], position):
            before = events[last[-1]]
            if activation_policies.get(before.name) == policy and stage_of.get(before.name) == stage_of.get(event.name):
                last.append(position)
                continue
        groups.append([position])
    return [group for group in groups if len(group) > 1]


def _follows(events: Sequence[Event], one: int, other: int) -> bool:
    """Whether two calls are of siblings, and the second one uses an output of the first."""
    parents = [events[position].name.rpartition(".")[0] for position in (one, other)]
    made = {value.id for value in events[one].outputs}
    return parents[0] == parents[1] and any(value.id in made for value in events[other].inputs)


def _compute_together(events: list[Event], before: Sequence[Event], group: Sequence[int]) -> None:
    """Later calls of a group keep no input made by an earlier one, and all are recomputed at once."""
    made: set[int] = set()
    again = 0
    for position in group:
        event = before[position]
        from_group = sum(value.nbytes for value in event.inputs if value.id in made)
        saved, offloaded = events[position].saved_bytes, events[position].offloaded_bytes
        dropped = min(from_group, saved)
        again += events[position].again_bytes + from_group
        # The whole group is recomputed when the backward of its last call begins.
        events[position] = events[position]._replace(
            saved_bytes=saved - dropped,
            offloaded_bytes=max(0, offloaded - (from_group - dropped)),
            again_bytes=again,
        )
        made |= {value.id for value in event.outputs}
