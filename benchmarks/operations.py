"""What is a device given to do in a step, beside a plain loop over the same microbatches?

A step's time on a GPU cannot be measured without one, but its work can be counted exactly: every aten operation of
every thread of Python (microbatches, sums, messages) passes a dispatch mode, below autograd and above the kernels. Any
but a view counts, and moves the bytes that it reads and writes by its schema; views, ``detach`` and allocations are no
work of a device. Figures are exact, so a test keeps them (``tests/ranks/test_operations.py``)::

    python -m benchmarks.operations               # all cases
    python -m benchmarks.operations bf16-true     # those whose name contains a word

Each case is a GPT in four microbatches. The plain loop adds gradients in the dtype in which the package does, in place.
With replicas and shards, each rank is compared with a plain loop over its own microbatches; with stages, the ranks
together are compared with one plain loop; with split layers, a rank has the operations of the plain loop and its own
share of the bytes.

Messages between ranks are no work of a single process. Operations that the package itself calls for it are counted
apart, by the place of the call: *messages* are sums of what has arrived and copies between a tensor and the memory of a
message, which a peer leaves to its backend, and *packing* are copies between parameters or gradients and the flat
buffers that are sent, which peers have as well. The peers are DDP and FSDP2 of PyTorch in the same layout, counted
alike. The last line is JSON: the worst ratios of each layout.
"""

import contextlib
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from benchmarks.operation_counts import Counts
from benchmarks.workloads import GPT, Chain
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

__all__ = ["CASES", "Case", "compare", "main"]

GPT_OF_CASES = GPT(vocabulary=64, separates_ends=True, length=16, width=48, num_blocks=6)
NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """A layout and a precision."""

    world: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    stored: torch.dtype = torch.float32
    """Dtype of the parameters."""
    computes: torch.dtype | None = None
    """Dtype of units, on copies of the parameters; ``None``: that of the parameters."""
    autocast: bool = False
    sums: torch.dtype | None = None
    """Dtype in which the plain loop adds gradients; ``None``: that of the parameters."""
    checkpoints: bool = False
    num_microbatches: int = NUM_MICROBATCHES

    @property
    def peer(self) -> str:
        """Part of PyTorch that has the same layout; empty: none that a plain loop could use."""
        # Gradients of DDP have the dtype of its parameters, which those of copies do not.
        if "sharded_data_parallel_degree" in self.options and self.computes is not torch.float16:
            return "FSDP2"
        is_alone = self.world == 1 or len(self.options) > 2 + ("gradient_dtype" in self.options)
        return "" if is_alone or self.computes is not None or self.sums is not None else "DDP"

    @property
    def shares(self) -> int:
        """Ranks that share the operations of one plain loop."""
        return int(self.options.get("pipeline_parallel_degree", 1))


HALF = torch.bfloat16
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "dp2": (2, {}),
}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16-true": {"stored": HALF, "sums": torch.float32},
    "bf16-true, gradients too": {"stored": HALF, "options": {"gradient_dtype": "parameter"}},
    "bf16-mixed": {"autocast": True},
    "bf16 on masters": {"computes": HALF, "options": {"bf16": True}},
    "fp16 on masters": {"computes": torch.float16, "options": {"fp16": True}},
}


def _case(layout: str, **precision: Any) -> Case:
    world, options = LAYOUTS[layout]
    merged = {
        "pipeline_parallel_degree": 1,
        "microbatches": NUM_MICROBATCHES,
        **options,
        **precision.pop("options", {}),
    }
    return Case(world=world, options=merged, **precision)


CASES: Mapping[str, Case] = {
    **{f"{layout}, {name}": _case(layout, **PRECISIONS[name]) for layout in LAYOUTS for name in PRECISIONS},
    "one, checkpointing": _case("one", checkpoints=True, options={"activation_checkpointing": "all"}),
    "pp2, checkpointing": _case("pp2", checkpoints=True, options={"activation_checkpointing": "all"}),
    "one, offload": _case("one", options={"offload_activations": True}),
}


class PlainLoop:
    """Plain loop of one process: microbatches one after the other, gradients added in place."""

    def __init__(self, case: Case, *, is_peer: bool = False) -> None:
        torch.manual_seed(0)
        self._case = case
        self.model = GPT_OF_CASES.model().to(case.stored)
        self._halves = self.model
        # Peers add up what has been reduced in the dtype of the parameters.
        self._sums = None if is_peer else case.sums
        self._whole: nn.Module = _wrapped(case, self.model) if is_peer else self._with_sums()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.batch = GPT_OF_CASES.batch(case.num_microbatches)

    def _with_sums(self) -> nn.Module:
        case = self._case
        if case.computes is not None:
            self._halves = copy.deepcopy(self.model).to(case.computes)
        for parameter, half in zip(self.model.parameters(), self._halves.parameters(), strict=True):
            if half is not parameter:
                half.register_post_accumulate_grad_hook(partial(_pass_on, parameter))
            elif case.sums is not None:
                parameter.grad_dtype = None  # any
        return self._halves

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        if self._halves is not self.model:
            with torch.no_grad():
                for parameter, half in zip(self.model.parameters(), self._halves.parameters(), strict=True):
                    half.copy_(parameter)
        number = self._case.num_microbatches
        pairs = zip(self.batch[0].chunk(number), self.batch[1].chunk(number), strict=True)
        for done, (inputs, targets) in enumerate(pairs, 1):
            is_alone = isinstance(self._whole, DistributedDataParallel) and done < number
            with (
                self._whole.no_sync() if is_alone else contextlib.nullcontext(),
                torch.autocast("cpu", HALF, enabled=self._case.autocast),
            ):
                (self._loss(inputs, targets) / number).backward()
            self._cast_gradients(self._sums)
        self._cast_gradients(self._case.stored)
        self.optimizer.step()

    def _cast_gradients(self, dtype: torch.dtype | None) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and dtype is not None:
                parameter.grad = parameter.grad.to(dtype)  # itself, if it has this dtype

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        if self._case.checkpoints:
            for part in self._halves.parts:
                x = checkpoint(part, x, use_reentrant=False) if x.requires_grad else part(x)
        else:
            x = self._whole(inputs)
        output = x.float() if self._case.computes is not None else x
        return GPT_OF_CASES.loss(output, targets)


def _wrapped(case: Case, model: Chain) -> nn.Module:
    if case.peer == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    policy = MixedPrecisionPolicy(param_dtype=case.computes, reduce_dtype=case.sums or case.computes and torch.float32)
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (case.world,)), mp_policy=policy)
    *others, last = model.parts
    for part in others:
        shard(part)
    shard(last, reshard_after_forward=False)
    shard(model)
    return model


def _pass_on(parameter: nn.Parameter, half: Tensor) -> None:
    gradient, half.grad = half.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def _counted_plain(case: Case, *, is_peer: bool = False) -> Counts:
    loop = PlainLoop(case, is_peer=is_peer)
    for _ in range(2):
        loop.step()
    counts = Counts()
    with counts:
        return counts.of(loop.step)


def _counted(case: Case) -> Counts:
    """Of this rank."""
    torch.manual_seed(0)
    model: Chain = GPT_OF_CASES.model().to(case.stored)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    batch = GPT_OF_CASES.batch(case.num_microbatches)
    engine = Engine(SMPConfig(**case.options))
    counts = Counts()
    scale = torch.ones(())

    def loss_of(parts: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", HALF, enabled=case.autocast):
            return GPT_OF_CASES.loss(model(parts[0]), parts[1])

    def step() -> None:
        optimizer.zero_grad()
        result = engine.train_step(loss_of, batch, loss_of=lambda loss: loss, reduces=True)
        result.commit(scale, reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)

    with counts.in_all_threads():
        engine.attach(model, [optimizer])
        for _ in range(2):
            step()
        counts.of(step)
    engine.detach()
    engine.close()
    return counts


@dataclass(frozen=True)
class Comparison:
    """Counts of the plain loop, of each rank, and of the first rank of a peer."""

    plain: Counts
    ranks: Sequence[Counts]
    shares: int
    peer: Counts | None

    @property
    def operations(self) -> float:
        """Ratio to the plain loop: of the fullest rank, or of all stages together."""
        return self._ratio([each.operations for each in self.ranks], self.plain.operations)

    @property
    def bytes_moved(self) -> float:
        """Ratio to the plain loop: of the fullest rank, or of all stages together."""
        return self._ratio([each.bytes_moved for each in self.ranks], self.plain.bytes_moved)

    @property
    def without_messages(self) -> float:
        """Ratio of bytes without sums and copies that a backend makes for peers."""
        return self._ratio([each.bytes_moved - each.of_messages for each in self.ranks], self.plain.bytes_moved)

    @property
    def without_exchange(self) -> float:
        """Ratio of bytes without these, and without packing."""
        own = [each.bytes_moved - each.of_messages - each.of_packing for each in self.ranks]
        return self._ratio(own, self.plain.bytes_moved)

    @property
    def of_peer(self) -> tuple[float, float] | None:
        """Ratios of the peer's operations and bytes, of which messages are no part."""
        if self.peer is None:
            return None
        return self.peer.operations / self.plain.operations, self.peer.bytes_moved / self.plain.bytes_moved

    @property
    def with_views(self) -> float:
        """Ratio of operations and views together."""
        return self._ratio(
            [each.operations + each.views for each in self.ranks], self.plain.operations + self.plain.views
        )

    def _ratio(self, found: Sequence[int], plain: int) -> float:
        return (sum(found) if self.shares > 1 else max(found)) / plain

    def differences(self) -> str:
        """Operations that the ranks have more or less often, together if they share a loop."""
        ranks = self.ranks if self.shares > 1 else self.ranks[:1]
        names = {name for each in (*ranks, self.plain) for name in each.by_name}
        more = {name: sum(r.by_name.get(name, 0) for r in ranks) - self.plain.by_name.get(name, 0) for name in names}
        ordered = sorted(more.items(), key=lambda item: -abs(item[1]))
        return ", ".join(f"{name} {count:+}" for name, count in ordered if count)


def compare(cases: Mapping[str, Case]) -> dict[str, Comparison]:
    """Count steps of the package, of the plain loop and of peers, of cases with equally many ranks."""
    (world,) = {case.world for case in cases.values()}
    of_ranks = run_ranks(_counted_each, world, list(cases.values()))
    with_peers = [case for case in cases.values() if case.peer]
    peers = iter(run_ranks(_counted_peers, world, with_peers)[0] if with_peers else [])
    return {
        name: Comparison(
            _counted_plain(case),
            [Counts(*found[number]) for found in of_ranks],
            case.shares,
            Counts(*next(peers)) if case.peer else None,
        )
        for number, (name, case) in enumerate(cases.items())
    }


def _counted_each(cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    return [_counted(case).figures for case in cases]


def _counted_peers(cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    return [_counted_plain(case, is_peer=True).figures for case in cases]


FIGURES = ("operations", "bytes_moved", "without_messages", "without_exchange", "with_views")


def main(words: Sequence[str]) -> None:
    """Print the table and the figures."""
    print("| case | plain: operations | bytes | ours: operations | bytes | operations | bytes", end="")
    print(" | without messages | and packing | with views | peer: operations | bytes |\n|" + "---|" * 12)
    found: dict[str, Comparison] = {}
    for layout in LAYOUTS:
        asked = [name for name in CASES if name.startswith(f"{layout},") and all(word in name for word in words)]
        found |= compare({name: CASES[name] for name in asked}) if asked else {}
        for name in asked:
            each = found[name]
            ranks = " + ".join(str(rank.operations) for rank in each.ranks)
            moved = " + ".join(f"{rank.bytes_moved:,}" for rank in each.ranks)
            plain = f"{each.plain.operations} | {each.plain.bytes_moved:,}"
            ratios = " | ".join(f"{getattr(each, figure):.3f}" for figure in FIGURES)
            peer = "{} {:.3f} | {:.3f}".format(CASES[name].peer, *each.of_peer) if each.of_peer else " | "
            print(f"| {name} | {plain} | {ranks} | {moved} | {ratios} | {peer} |")
            print("   ", each.differences(), flush=True)
    print(json.dumps(_worst(found)))


def _worst(found: Mapping[str, Comparison]) -> dict[str, dict[str, float]]:
    worst: dict[str, dict[str, float]] = {}
    for layout in LAYOUTS:
        those = [each for name, each in found.items() if name.startswith(f"{layout},")]
        for figure in FIGURES if those else ():
            ratio = max(getattr(each, figure) for each in those)
            worst.setdefault(f"worst_{figure.removesuffix('_moved')}", {})[layout] = round(ratio, 4)
        peers = [each.of_peer for each in those if each.of_peer is not None]
        for figure, ratios in zip(("operations", "bytes"), zip(*peers, strict=True), strict=False):
            worst.setdefault(f"worst_{figure}_of_peer", {})[layout] = round(max(ratios), 4)
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
