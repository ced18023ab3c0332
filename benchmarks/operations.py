"""What is a device given to do in a step, beside a plain loop over the same microbatches?

A step's time on a GPU cannot be measured without one, but its work can be counted exactly: every aten operation of
every thread of Python (microbatches, sums, messages) passes a dispatch mode, below autograd and above the kernels. Any
but a view counts, and moves the bytes of its inputs and of its results; views, ``detach`` and allocations are no work
of a device. Figures are exact, so a test keeps them (``tests/ranks/test_operations.py``)::

    python -m benchmarks.operations               # all cases
    python -m benchmarks.operations bf16-true     # those whose name contains a word

Each case is a GPT in four microbatches. The plain loop adds gradients in the dtype in which the package does, in place.
With replicas and shards, each rank is compared with a plain loop over its own microbatches; with stages, the ranks
together are compared with one plain loop; with split layers, a rank has the operations of the plain loop and its own
share of the bytes. What leaves a rank and what arrives there is not work that a single process has, so copies of
messages, gathers and sums over ranks are in the table's last two columns, by difference: what is more than the plain
loop does. The last line is JSON: the worst ratios of each layout.
"""

import contextlib
import copy
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import GPT, Chain
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

__all__ = ["CASES", "Case", "Counts", "compare", "main"]

GPT_OF_CASES = GPT(vocabulary=64, separates_ends=True, length=16, width=48, num_blocks=6)
NUM_MICROBATCHES = 4
# Not views by their schema, but without work for a device.
_NO_WORK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "set_", "_unsafe_view", "_lazy_clone"})


@dataclass
class Counts(TorchDispatchMode):
    """Operations of all threads, while it counts."""

    operations: int = 0
    """That compute or copy."""
    bytes_moved: int = 0
    views: int = 0
    """Views and allocations."""
    by_name: dict[str, int] = field(default_factory=dict)
    is_on: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on and func.namespace == "aten":
            name = str(func.overloadpacket).removeprefix("aten.")
            if func.is_view or name in _NO_WORK:
                self.views += 1
            else:
                self.operations += 1
                self.by_name[name] = self.by_name.get(name, 0) + 1
                tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
                self.bytes_moved += sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
        return result

    @contextlib.contextmanager
    def in_all_threads(self) -> Iterator[None]:
        """Context whose threads have this mode from their start on."""
        run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with self:
                run(thread)

        threading.Thread.run = watched
        try:
            with self:
                yield
        finally:
            threading.Thread.run = run

    def of(self, step: Callable[[], object]) -> "Counts":
        """Count ``step``."""
        self.is_on = True
        step()
        self.is_on = False
        return self


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

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self._case = case
        self.model = GPT_OF_CASES.model().to(case.stored)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.batch = GPT_OF_CASES.batch(case.num_microbatches)
        self._halves = copy.deepcopy(self.model).to(case.computes) if case.computes is not None else self.model
        for parameter, half in zip(self.model.parameters(), self._halves.parameters(), strict=True):
            if half is not parameter:
                half.register_post_accumulate_grad_hook(partial(_pass_on, parameter))
            elif case.sums is not None:
                parameter.grad_dtype = None  # any

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        if self._halves is not self.model:
            with torch.no_grad():
                for parameter, half in zip(self.model.parameters(), self._halves.parameters(), strict=True):
                    half.copy_(parameter)
        number = self._case.num_microbatches
        for inputs, targets in zip(self.batch[0].chunk(number), self.batch[1].chunk(number), strict=True):
            with torch.autocast("cpu", HALF, enabled=self._case.autocast):
                (self._loss(inputs, targets) / number).backward()
            self._cast_gradients(self._case.sums)
        self._cast_gradients(self._case.stored)
        self.optimizer.step()

    def _cast_gradients(self, dtype: torch.dtype | None) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and dtype is not None:
                parameter.grad = parameter.grad.to(dtype)  # itself, if it has this dtype

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        for part in self._halves.parts:
            x = checkpoint(part, x, use_reentrant=False) if self._case.checkpoints and x.requires_grad else part(x)
        output = x.float() if self._case.computes is not None else x
        return GPT_OF_CASES.loss(output, targets)


def _pass_on(parameter: nn.Parameter, half: Tensor) -> None:
    gradient, half.grad = half.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def _counted_plain(case: Case) -> Counts:
    loop = PlainLoop(case)
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
    return Counts(counts.operations, counts.bytes_moved, counts.views, counts.by_name)


@dataclass(frozen=True)
class Comparison:
    """Counts of the plain loop and of each rank."""

    plain: Counts
    ranks: Sequence[Counts]
    shares: int

    @property
    def operations(self) -> float:
        """Ratio to the plain loop: of the fullest rank, or of all stages together."""
        return self._ratio([each.operations for each in self.ranks], self.plain.operations)

    @property
    def bytes_moved(self) -> float:
        """Ratio to the plain loop: of the fullest rank, or of all stages together."""
        return self._ratio([each.bytes_moved for each in self.ranks], self.plain.bytes_moved)

    def _ratio(self, found: Sequence[int], plain: int) -> float:
        return (sum(found) if self.shares > 1 else max(found)) / plain

    @property
    def with_views(self) -> float:
        """Ratio of operations and views together."""
        return self._ratio(
            [each.operations + each.views for each in self.ranks], self.plain.operations + self.plain.views
        )

    def differences(self) -> str:
        """Operations that the ranks have more or less often, together if they share a loop."""
        ranks = self.ranks if self.shares > 1 else self.ranks[:1]
        names = {name for each in (*ranks, self.plain) for name in each.by_name}
        more = {name: sum(r.by_name.get(name, 0) for r in ranks) - self.plain.by_name.get(name, 0) for name in names}
        ordered = sorted(more.items(), key=lambda item: -abs(item[1]))
        return ", ".join(f"{name} {count:+}" for name, count in ordered if count)


def compare(cases: Mapping[str, Case]) -> dict[str, Comparison]:
    """Count steps of the package and of the plain loop, of cases with equally many ranks."""
    (world,) = {case.world for case in cases.values()}
    of_ranks = run_ranks(_counted_each, world, list(cases.values()))
    plain = [_counted_plain(case) for case in cases.values()]
    return {
        name: Comparison(plain[number], [Counts(*found[number]) for found in of_ranks], case.shares)
        for number, (name, case) in enumerate(cases.items())
    }


def _counted_each(cases: Sequence[Case]) -> list[tuple[int, int, int, dict[str, int]]]:
    found = map(_counted, cases)
    return [(each.operations, each.bytes_moved, each.views, each.by_name) for each in found]


def main(words: Sequence[str]) -> None:
    """Print the table and the figures."""
    print("| case | plain: operations | bytes | ours: operations | bytes | operations | bytes | with views |")
    print("|---|---|---|---|---|---|---|---|")
    found: dict[str, Comparison] = {}
    for layout in LAYOUTS:
        asked = [name for name in CASES if name.startswith(f"{layout},") and all(word in name for word in words)]
        found |= compare({name: CASES[name] for name in asked}) if asked else {}
        for name in asked:
            each = found[name]
            ranks = " + ".join(str(rank.operations) for rank in each.ranks)
            moved = " + ".join(f"{rank.bytes_moved:,}" for rank in each.ranks)
            plain = f"{each.plain.operations} | {each.plain.bytes_moved:,}"
            ratios = f"{each.operations:.3f} | {each.bytes_moved:.3f} | {each.with_views:.3f}"
            print(f"| {name} | {plain} | {ranks} | {moved} | {ratios} |")
            print("   ", each.differences(), flush=True)
    figures: dict[str, dict[str, float]] = {"worst_operations": {}, "worst_bytes": {}, "worst_with_views": {}}
    for layout in LAYOUTS:
        those = [each for name, each in found.items() if name.startswith(f"{layout},")]
        if those:
            figures["worst_operations"][layout] = round(max(each.operations for each in those), 4)
            figures["worst_bytes"][layout] = round(max(each.bytes_moved for each in those), 4)
            figures["worst_with_views"][layout] = round(max(each.with_views for each in those), 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
