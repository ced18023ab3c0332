"""What activations of a step take, and what it costs to have less of them, on one device::

    python benchmarks/gpu/activations.py

Forward and backward of a GPT in bfloat16, with the same weights and batches, in several ways:

* ``nothing``: everything is kept.
* ``checkpoint``: the engine computes each block again (``activation_checkpointing="all"``).
* ``checkpoint + offload``: and puts the blocks' inputs into host memory (``offload_activations=True``).
* ``offload``: what blocks keep goes into host memory; nothing is computed again.
* ``save_on_cpu``: PyTorch's ``torch.autograd.graph.save_on_cpu(pin_memory=True)``, around a plain model.
* ``torchtune-style``: copies on a stream of their own, of what each operation keeps, around a plain model
  (benchmarks/gpu/stream_offload.py).

All memory is counted less what was allocated before the step:

* ``peak``: the most. Gradients are dropped before each step, so they are in it, for all alike.
* ``kept``: what there is when backward begins. No weight has a gradient then: these are the activations alone.
* ``gradients``: what is left after the step.

If ``peak`` does not fall with ``kept``, it lies at the end of backward, where gradients have taken the place of
activations. ``overlap`` is the share of the time of copies between host and
device in which the device computed as well, from a profiler's trace of one more step, which ``--trace FOLDER`` writes.
Losses of all ways are compared first.

The last line is JSON: ``gone`` (the share of the peak of ``nothing`` that the best way of the engine with offload does
without), ``kept`` (what that way keeps, over what the same one without offload keeps), ``slower`` (what its step takes
longer than that), ``overlap``.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from model import GPT, Shape
from stream_offload import StreamOffload
from tables import Target, arguments, finish, seconds, show
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.profiler import ProfilerActivity, profile

from benchmarks.live_bytes import Baseline, LiveBytes
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine

ROUNDS, WARM_UPS = 10, 3
CHECKPOINT, OFFLOAD = {"activation_checkpointing": "all"}, {"offload_activations": True}
ENGINE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "checkpoint": CHECKPOINT,
    "checkpoint + offload": {**CHECKPOINT, **OFFLOAD},
    "offload": OFFLOAD,
}
# Each way with offload of the engine, and the way that is like it but for that.
WITHOUT_OFFLOAD = {"checkpoint + offload": "checkpoint", "offload": "nothing"}


class Found(NamedTuple):
    """Of a way."""

    loss: float
    peak: float
    kept: float
    gradients: float
    seconds: float
    overlap: float | None


def main() -> None:
    """Measure, and print."""
    options = arguments(__doc__, width=2048, layers=24, samples=4, trace="")
    shape = Shape(layers=options.layers, width=options.width, heads=options.width // 128, length=4096)
    if options.tiny:
        shape = Shape(layers=8, width=16, heads=2, length=8)
    device = torch.device(options.device) if options.device == "cpu" else torch.device(options.device, 0)
    join_alone()
    offload = {"save_on_cpu": lambda: save_on_cpu(pin_memory=device.type != "cpu")}
    offload["torchtune-style"] = lambda: StreamOffload(device)
    # Otherwise nothing of a tiny model is large enough.
    least = {"offload_min_bytes": 0} if options.tiny else {}
    found = {}
    for name in (*ENGINE, *offload):
        torch.manual_seed(0)
        model = GPT(shape).to(device, torch.bfloat16)
        batch, trace = shape.batch(options.samples, device), options.trace and f"{options.trace}/{name}.json"
        memory = Memory(device)
        loss = memory.noting(model.loss)
        if name in ENGINE:
            step = engine_step(model, loss, batch, device, ENGINE[name] | (least if name in WITHOUT_OFFLOAD else {}))
        else:
            step = plain_step(loss, batch, offload[name])
        found[name] = measured(step, model, memory, device, is_tiny=options.tiny, trace=trace)
        print(f"{name}: {found[name]}", flush=True)
        del model, loss, memory, step
        gc.collect()
    report(found, f"{shape}, {options.samples} samples, on {device}", device)


def report(found: dict[str, Found], title: str, device: torch.device) -> None:
    """Print what was found, and end."""
    nothing = found["nothing"]
    assert all(abs(each.loss - nothing.loss) < 1e-2 for each in found.values()), found
    rows = [
        [
            name,
            each.peak / 2**20,
            each.peak / nothing.peak,
            each.kept / 2**20,
            each.gradients / 2**20,
            each.seconds,
            "-" if each.overlap is None else each.overlap,
        ]
        for name, each in found.items()
    ]
    show(title, ["way", "peak in MiB", "of nothing", "kept", "gradients", "seconds", "overlap"], rows)
    best = min(WITHOUT_OFFLOAD, key=lambda name: found[name].peak)
    figures = {
        "device": str(device),
        "best": best,
        "gone": 1 - found[best].peak / nothing.peak,
        "kept": found[best].kept / found[WITHOUT_OFFLOAD[best]].kept,
        "slower": found[best].seconds / found[WITHOUT_OFFLOAD[best]].seconds - 1,
        "overlap": found[best].overlap,
    }
    finish(figures, [Target("gone", 0.6, is_least=True), Target("slower", 0.02, is_least=False)])


Step = Callable[[], Tensor]
Loss = Callable[[Tensor], Tensor]


def engine_step(model: GPT, loss: Loss, batch: Tensor, device: torch.device, options: dict[str, Any]) -> Step:
    """Forward and backward by the engine; returns the loss."""
    engine = Engine(SMPConfig(**options), device=device)
    engine.attach(model)

    def step() -> Tensor:
        result = engine.train_step(loss, batch, loss_of=lambda loss: loss)
        result.commit(torch.ones((), device=device), reduce=True)
        assert result.loss is not None
        return result.loss

    return step


def plain_step(loss_of: Loss, batch: Tensor, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Step:
    """Forward and backward of a plain loop."""

    def step() -> Tensor:
        with around():
            loss = loss_of(batch)
        loss.backward()
        return loss.detach()

    return step


class Memory:
    """Bytes on a device: now, and the most since :meth:`begin`, both less those of then."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_host = device, device.type == "cpu"
        self._baseline = Baseline()
        self._watch = LiveBytes(iter(()))
        self._before = 0
        self.kept = 0

    def during(self, step: Step) -> tuple[int, int]:
        """Bytes at most in ``step``, and after it."""
        if self._is_host:
            self._watch = LiveBytes(self._baseline.since())
            self._before = self._watch.now()
            self._watch.during(step)
            return self._watch.peak - self._before, self._now()
        torch.accelerator.synchronize(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before = torch.accelerator.memory_allocated(self._device)
        step()
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.max_memory_allocated(self._device) - self._before, self._now()

    def _now(self) -> int:
        now = self._watch.now() if self._is_host else torch.accelerator.memory_allocated(self._device)
        return now - self._before

    def noting(self, loss_of: Loss) -> Loss:
        """``loss_of``, whose result notes in ``kept`` what is there as its backward begins."""

        def noted(batch: Tensor) -> Tensor:
            loss = loss_of(batch)
            if loss.requires_grad:
                loss.register_hook(lambda gradient: setattr(self, "kept", self._now()))
            return loss

        return noted


def measured(step: Step, model: GPT, memory: Memory, device: torch.device, *, is_tiny: bool, trace: str) -> Found:
    """Loss, memory, time and overlap of ``step``."""

    def whole() -> Tensor:
        model.zero_grad(set_to_none=True)
        return step()

    loss = whole().item()
    whole()
    model.zero_grad(set_to_none=True)
    peak, gradients = memory.during(step)
    kept = memory.kept
    rounds, warm_ups = (1, 0) if is_tiny else (ROUNDS, WARM_UPS)
    taken = seconds(whole, device, rounds=rounds, warm_ups=warm_ups)
    overlap = overlap_of(whole, trace) if device.type == "cuda" else None
    return Found(loss, peak, kept, gradients, taken, overlap)


def overlap_of(step: Callable[[], object], trace: str) -> float | None:
    """The share of the copies between host and device that went on while kernels ran."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.accelerator.synchronize()
    if trace:
        profiler.export_chrome_trace(trace)
    on_device = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    copies = [each.time_range for each in on_device if "HtoD" in each.name or "DtoH" in each.name]
    kernels = [each.time_range for each in on_device if "Mem" not in each.name]
    return share_covered([(x.start, x.end) for x in copies], [(x.start, x.end) for x in kernels])


Span = tuple[float, float]


def share_covered(spans: list[Span], by: list[Span]) -> float | None:
    """Which part of ``spans`` lies in others; ``None`` if there are none."""
    total = sum(end - start for start, end in spans)
    if not total:
        return None
    covers = list(union(by))
    covered = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in spans for begin, stop in covers)
    return covered / total


def union(spans: list[Span]) -> Iterator[Span]:
    """The same time in spans that do not touch."""
    start = end = None
    for begin, stop in sorted(spans):
        if end is None or begin > end:
            if end is not None:
                yield start, end
            start, end = begin, stop
        else:
            end = max(end, stop)
    if end is not None:
        yield start, end


def join_alone() -> None:
    """A process group of one rank, which the engine needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    main()
