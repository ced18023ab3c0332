"""ZeRO-1/2: optimizer state is sharded over replicas by whole parameters; each parameter has one owner that updates it.

Replicas would all keep the same state and compute the same updates. Instead the parameters of a stage are dealt out
over its replicas, balanced by size, as SageMaker's ``shard_optimizer_state`` does (ZeRO, stages 1 and 2; Rajbhandari et
al. 2020). Whole parameters, not slices: an optimizer that looks at a whole matrix (Muon, Adafactor, LAMB) computes what
it would in a single process.

Between the last backward and the optimizer each gradient is averaged on its owner alone, and the others drop theirs. To
an optimizer a parameter without gradient does not exist: it makes no state for it. After its step each owner broadcasts
the new values, which travel while the next forward has begun. If the user's hooks look at gradients all replicas keep
them until the step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.data_parallel.bucketed_all_reduce import Bucket
from smp_strategy.data_parallel.gradient_sums import alike
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.balance import balanced
from smp_strategy.distributed.buckets import BUCKET_BYTES, buckets
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.guarded_tensors import (
    BY_IDENTITY,
    GRADIENT,
    HARMLESS,
    Guard,
    guard_of,
    untracked,
    unwatch,
    watch,
)
from smp_strategy.model.ownership import Ownership

__all__ = ["ZeroOptimizer", "ParameterBroadcast"]


@final
class ZeroOptimizer:
    """Owner of each parameter among the replicas, and the exchange of gradients and values that follows from it.

    Args:
        ownership: Stages that hold each parameter.
        mesh: Places of the stages and replicas.
        is_on: Whether the parameters are dealt out; otherwise every replica updates all of them.

    Attributes:
        is_on: Whether the parameters are dealt out, and there is more than one replica.
        drops_gradients: Whether a replica keeps averaged gradients of its own parameters only.
        arrivals: New values on their way from other replicas.
    """

    def __init__(self, ownership: Ownership, mesh: ProcessMesh, *, is_on: bool) -> None:
        self.is_on = is_on and mesh.dp > 1
        self.show_gradients(everyone=False)
        self._ownership = ownership
        self._mesh = mesh
        self._held: set[Tensor] = set(ownership.local_parameters(mesh.stage))
        self._owners: dict[int, dict[Tensor, int]] = {}
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._hidden: dict[nn.Parameter, Tensor] = {}
        self._updating: Optimizer | None = None
        self.arrivals = ParameterBroadcast()

    def show_gradients(self, *, everyone: bool) -> None:
        """Let all replicas keep averaged gradients until the optimizer's step, or the owners only; between steps."""
        self.drops_gradients = self.is_on and not everyone

    def owner(self, parameter: Tensor, stage: int) -> int:
        """Replica that updates ``parameter`` on ``stage``, which holds it; the first if all do."""
        if not self.is_on:
            return 0
        if stage not in self._owners:
            owners: dict[Tensor, int] = {}
            self._owners[stage] = owners
            parameters = self._ownership.local_parameters(stage)
            for is_trained in (True, False):  # frozen ones may be trained later
                members = [each for each in parameters if each.requires_grad == is_trained]
                sizes = [each.numel() * each.element_size() for each in members]
                owners.update(zip(members, balanced(sizes, self._mesh.dp), strict=True))
        return self._owners[stage][parameter]

    def is_mine(self, parameter: Tensor) -> bool:
        """Whether this rank updates ``parameter``."""
        return parameter in self._held and (not self.is_on or self._owner(parameter) == self._mesh.dp_rank)

    def buckets(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        return list(self._rounds(parameters)) if self.drops_gradients else alike(parameters)

    def set_averages_aside(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set averaged gradients aside, before more is added whose sums will be averaged.

        Only the owners have these averages, so they must not be counted like the gradients of each replica.
        """
        for parameter in parameters if self.drops_gradients else ():
            self._averages.pop(parameter, None)
            if parameter.grad is not None:
                self._averages[parameter], parameter.grad = parameter.grad, None

    def put_averages_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the averages set aside to those of the gradients that came since."""
        for parameter in parameters if self._averages else ():
            if (before := self._averages.pop(parameter, None)) is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def begin_update(self, optimizer: Optimizer) -> None:
        """Hide final gradients from ``optimizer``, except those that this rank applies."""
        self._updating = optimizer
        for parameter in self._dealt_out(optimizer):
            if parameter.grad is not None and not self.is_mine(parameter):
                self._hidden[parameter] = parameter.grad
                parameter.grad = None

    def end_update(self, optimizer: Optimizer) -> None:
        """Broadcast the updated parameters to all replicas asynchronously. Collective over the replicas.

        Units wait for theirs when they are next called. Without a call of :meth:`begin_update` every replica that had
        the gradients has updated all parameters itself.
        """
        if self._updating is not optimizer and not self.drops_gradients:
            return
        self._updating = None
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden.clear()
        self.arrivals.wait()
        for shares in self._rounds(self._dealt_out(optimizer)):
            self._pass_on(shares)

    @contextmanager
    def changing_weights(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which ``optimizer`` may change weights for which it has state. Collective over the replicas."""
        self.arrivals.wait()
        members = self._dealt_out(optimizer, also_frozen=True)
        versions = [each._version for each in members]
        yield
        if not members:
            return
        changed = any(each._version != version for each, version in zip(members, versions, strict=True))
        # Most calls change nothing: `train()` in each step finds the optimizer in that mode already.
        is_new = torch.tensor(float(changed), device=members[0].device)
        group = self._mesh.dp_group
        collectives.reduce_numbers(is_new, dist.ReduceOp.MAX, group=group, doing="whether weights have changed").wait()
        for shares in self._rounds(members) if is_new else ():
            self._pass_on(shares)

    def _pass_on(self, shares: Sequence[Sequence[nn.Parameter]]) -> None:
        sizes = [sum(parameter.numel() for parameter in share) for share in shares]
        example = next(parameter for share in shares for parameter in share)
        own = torch.zeros(max(sizes), dtype=example.dtype, device=example.device)
        here = self._mesh.dp_rank
        if values := [parameter.detach().reshape(-1) for parameter in shares[here]]:
            torch.cat(values, out=own[: sizes[here]])
        gathered = list(own.new_empty(self._mesh.dp, len(own)).unbind())
        work = collectives.all_gather(gathered, own, group=self._mesh.dp_group, doing="weights of other replicas")
        others = [replica for replica in range(self._mesh.dp) if replica != here]

        def fill() -> None:
            work.wait()
            for replica in others:
                _fill(shares[replica], gathered[replica][: sizes[replica]])

        self.arrivals.expect([parameter for replica in others for parameter in shares[replica]], fill)

    def _owner(self, parameter: Tensor) -> int:
        return self.owner(parameter, self._mesh.stage)

    def _dealt_out(self, optimizer: Optimizer, *, also_frozen: bool = False) -> list[nn.Parameter]:
        """Parameters that one replica updates and the others wait for, in the order of their use."""
        if not self.is_on:
            return []
        given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        local = self._ownership.local_parameters(self._mesh.stage)
        return [parameter for parameter in local if parameter in given and (also_frozen or parameter.requires_grad)]

    def _rounds(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[list[nn.Parameter]]]:
        """Buckets, each of one dtype: for each replica the parameters that it owns."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            owned: list[list[nn.Parameter]] = [[] for _ in range(self._mesh.dp)]
            for parameter in parameters:
                if parameter.dtype == dtype:
                    owned[self._owner(parameter)].append(parameter)
            most_bytes = BUCKET_BYTES // self._mesh.dp
            runs = [[[share[number] for number in run] for run in buckets(share, most_bytes)] for share in owned]
            for together in zip_longest(*runs, fillvalue=[]):
                yield list(together)


def _fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


# --- broadcast -------------------------------------------------------------------------------------------------------
# Asynchronous broadcast of updated parameters: units wait for theirs when they are next called.
#
# Once an optimizer has stepped, the next forward can begin before all values have arrived: a unit waits for its own
# parameters when it is called, while those of later units still travel. Everything else that might look at a parameter
# until then, be it code above the units, a hook or a callback that saves weights, must not get the old value. So a
# parameter is guarded while it waits (`smp_strategy.model.guarded_tensors`): metadata and gradients are answered at
# once, all other uses wait for the values.


@final
class ParameterBroadcast:
    """Values that are on their way to this rank."""

    def __init__(self) -> None:
        self._under_way: list[Handle[None]] = []

    def expect(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        """Hide ``parameters`` until ``finish`` has waited for their values and filled them in."""
        if all(type(parameter) is nn.Parameter for parameter in parameters):
            work = Handle(partial(_fill_in, parameters, finish))
            self._under_way.append(work)
            guard = _Awaited(work)
            for parameter in parameters:
                watch(parameter, guard)
        else:  # a class of the user's, which may mean something
            with torch.no_grad():
                finish()

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for those of ``parameters`` that are on their way."""
        for parameter in parameters if self._under_way else ():
            if isinstance(guard := guard_of(parameter), _Awaited):
                guard.lift()
        self._under_way = [work for work in self._under_way if not work.is_done()]

    def wait(self) -> None:
        wait_for(self._under_way)
        self._under_way = []


def _fill_in(parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
    # If another rank is gone this raises, now and whenever the parameters are used again.
    with untracked():
        finish()
    for parameter in parameters:
        unwatch(parameter)


@final
class _Awaited(Guard):
    """Guard of parameters whose new values are on their way: a use waits for them."""

    free = HARMLESS | GRADIENT | BY_IDENTITY

    def __init__(self, work: Handle[None]) -> None:
        self._work = work

    def lift(self) -> None:
        """Wait for the values."""
        self._work.wait()
