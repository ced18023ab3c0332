"""A pretrained model is loaded, trained for a step and saved by four ranks, beside one plain process::

    python benchmarks/pretrained.py              # 1 GB of weights, some minutes on two cores
    python benchmarks/pretrained.py --size 2     # 2 GB, in one round
    python benchmarks/pretrained.py --quick      # some megabytes: does it run?

A model like Llama with random float32 weights is saved into several safetensors files, which stay in the system's
memory. A LightningModule loads it by ``from_pretrained`` in ``configure_model``: on four stages (pp4), in a shard group
of four (sdp4), and in one plain process.

The last line is JSON, each figure the worse one of pp4 and sdp4:

* ``peak_over_share``: growth of a rank's resident set, at its peak during loading, over its share of the weights.
  ``allowed`` is the same for its share, the largest unit, and a tenth of the share. A rank's share is what it holds.
* ``load_over_plain``: seconds from the beginning of ``from_pretrained`` until all ranks have their values, over those
  of the plain process. They include the trace of the step and the partition, without which ranks do not know what to
  read; ``read_over_plain`` leaves these out. Plain loading maps files, so its values count as loaded once each page of
  them has been copied on write, as the first step of an optimizer does. ``load_over_mapped`` is beside plain loading
  that only reads from each page.
* ``load_cpu_over_plain`` and ``read_cpu_over_plain``: the same in seconds of CPU time of the busiest rank, which other
  programs on the machine disturb less. They say what elapsed times are where each rank has a core of its own.
* ``startup_over_plain``: seconds until the first step has ended, with delayed initialisation over without.
* ``save_over_plain``: seconds of saving the whole weights, over those of the plain process.

There is no column for FSDP2 with Accelerate's ``fsdp_cpu_ram_efficient_loading``: Accelerate 1.15 selects FSDP for
accelerators only (``AcceleratorState.__init__``). On CPUs ``Accelerator(cpu=True, fsdp_plugin=...)`` stays
``MULTI_CPU``, passes over the plugin and wraps the model in DistributedDataParallel, with all of it on each rank.
"""

import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from smp_strategy import SMPStrategy
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.testing import run_ranks

RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp4": {"pipeline_parallel_degree": RANKS, "microbatches": RANKS},
    "sdp4": {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": RANKS},
}
TIMEOUT = 900.0


class Size(NamedTuple):
    """Size of the model."""

    layers: int
    width: int
    vocabulary: int
    rounds: int

    def save(self, folder: Path) -> None:
        """Write a model of this size."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=11 * self.width // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        model = LlamaForCausalLM(config)
        total = sum(each.nbytes for each in model.parameters())
        model.save_pretrained(folder, max_shard_size=total // 6)


SIZES = {"quick": Size(4, 64, 512, 1), "1": Size(16, 1024, 24_000, 3), "2": Size(36, 1024, 24_000, 1)}


class Figures(NamedTuple):
    """What one rank has measured. Bytes and seconds."""

    share: int
    unit: int
    peak: int
    anonymous: int
    load: float
    read: float
    startup: float
    save: float
    load_cpu: float
    read_cpu: float


class Watch:
    """Growth of the resident set of this process since the watch was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        self._before, self._anonymous = resident("VmRSS"), resident("RssAnon")
        self.peak = self.anonymous = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        # The kernel keeps no peak of anonymous memory alone.
        while not self._is_over.wait(0.002):
            self.anonymous = max(self.anonymous, resident("RssAnon") - self._anonymous)

    def end(self) -> None:
        """Take the figures."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            self.peak = resident("VmHWM") - self._before


def resident(name: str) -> int:
    """A figure of the resident set of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


class Tuned(L.LightningModule):
    """Fine-tunes the model in ``folder``; ``touch`` makes sure that the values of plain loading are there."""

    def __init__(self, folder: Path, touch: Callable[[nn.Module], None] | None) -> None:
        super().__init__()
        self.folder, self.touch = folder, touch
        self.watch: Watch | None = None
        self.begin = self.built = self.first_step = 0.0
        self.cpu_begin = self.cpu_built = 0.0

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.watch, self.begin, self.cpu_begin = Watch(), time.perf_counter(), time.process_time()
            self.model = AutoModelForCausalLM.from_pretrained(self.folder)
            if self.touch is not None:
                self.touch(self.model)
                self.watch.end()
            self.built, self.cpu_built = time.perf_counter(), time.process_time()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.note_first_step()

    def note_first_step(self) -> None:
        """The first step has ended now, unless it has ended before."""
        self.first_step = self.first_step or time.perf_counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def copy_on_write(model: nn.Module) -> None:
    """Let each page of the parameters be memory of this process."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::1024].mul_(1.0)


def read_pages(model: nn.Module) -> None:
    """Read a number of each page of the parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::1024].sum()


class Loaded(NamedTuple):
    """The end of loading on a rank under the strategy."""

    at: float
    cpu_at: float
    reading: float
    cpu_reading: float
    share: int


@contextmanager
def noting_loads(module: Tuned) -> Iterator[list[Loaded]]:
    """Note when this rank has its values, and how many bytes."""
    construct, found = LocalModel.__init__, []

    def noted(self: LocalModel, *args: Any, **options: Any) -> None:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        construct(self, *args, **options)
        end, cpu_end = time.perf_counter(), time.process_time()
        assert module.watch is not None
        module.watch.end()
        spread = self.holdings.sharded
        share = sum(each.nbytes for each in self.holdings.parameters if not spread.has(each))
        held = share + spread.held_bytes
        found.append(Loaded(end, cpu_end, end - begin, cpu_end - cpu_begin, held))

    LocalModel.__init__ = noted
    try:
        yield found
    finally:
        LocalModel.__init__ = construct


def largest_unit(strategy: Any) -> int:
    """Bytes of the largest unit."""
    engine: Engine = strategy.engine
    return max(sum(each.nbytes for each in unit.module.parameters()) for unit in engine.layout.units)


def save_whole(trainer: L.Trainer, folder: Path) -> None:
    """Save the weights. A sharded ``save_pretrained`` would be timed here."""
    trainer.save_checkpoint(folder / "saved.ckpt", weights_only=True)


def fine_tune(
    weights: Path,
    folder: Path,
    options: Mapping[str, Any] | None,
    touch: Callable[[nn.Module], None] | None = None,
    *,
    saves: bool,
) -> Figures:
    """Load, train for a step, save if asked to; without ``options`` in one plain process."""
    warnings.simplefilter("ignore")
    module, saver = Tuned(weights, touch), Saves(folder)
    strategy: Any = "auto" if options is None else SMPStrategy(**options, restore_module="none")
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=dist.get_world_size() if options is not None else 1,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[saver] if saves else [],
    )
    tokens = torch.randint(0, 512, (8, 16), generator=torch.Generator().manual_seed(0))
    dist.barrier()
    begin = time.perf_counter()
    with noting_loads(module) as loads:
        trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=4))
    assert module.watch is not None
    module.watch.end()
    building, startup = module.built - module.begin, module.first_step - begin
    cpu = module.cpu_built - module.cpu_begin
    memory = (module.watch.peak, module.watch.anonymous)
    if not loads:
        total = sum(each.nbytes for each in module.parameters())
        return Figures(total, 0, *memory, building, building, startup, saver.seconds, cpu, cpu)
    [load] = loads
    unit = largest_unit(trainer.strategy)
    seconds = (load.at - module.begin, building + load.reading, startup, saver.seconds)
    return Figures(load.share, unit, *memory, *seconds, load.cpu_at - module.cpu_begin, cpu + load.cpu_reading)


class Saves(L.Callback):
    """Saves the weights after the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        assert isinstance(module, Tuned)
        module.note_first_step()  # whose own hook comes later
        dist.barrier()
        begin = time.perf_counter()
        save_whole(trainer, self.folder)
        dist.barrier()
        self.seconds = time.perf_counter() - begin


def measure(
    weights: Path, folder: Path, layout: str | None, touch: Callable[[nn.Module], None] | None, *, delayed: bool
) -> list[Figures]:
    """Figures by rank of one run; without a ``layout`` of the plain process."""
    options = None if layout is None else {**LAYOUTS[layout], "delayed_parameter_initialization": delayed}
    ranks = 1 if layout is None else RANKS
    # A checkpoint is as large as the weights: only the sides that are compared write one.
    saves = delayed or touch is copy_on_write
    return run_ranks(partial(fine_tune, saves=saves), ranks, weights, folder, options, touch, timeout=TIMEOUT)


def best(runs: list[list[Figures]]) -> Figures:
    """Of the slowest and largest rank; the shortest time of several runs, as others may use the machine."""
    worst = [Figures(*map(max, zip(*run, strict=True))) for run in runs]
    return Figures(*map(min, zip(*worst, strict=True)))


def compare(weights: Path, folder: Path, rounds: int) -> dict[str, Figures]:
    """All sides, in turns."""
    sides: dict[str, tuple[str | None, Callable[[nn.Module], None] | None, bool]] = {
        "plain": (None, copy_on_write, False),
        "mapped": (None, read_pages, False),
        **{layout: (layout, None, True) for layout in LAYOUTS},
        **{f"{layout} at once": (layout, None, False) for layout in LAYOUTS},
    }
    found: dict[str, list[list[Figures]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (layout, touch, delayed) in sides.items():
            begin = time.perf_counter()
            found[name].append(measure(weights, folder, layout, touch, delayed=delayed))
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return {name: best(runs) for name, runs in found.items()}


def show(found: Mapping[str, Figures]) -> None:
    """As a table."""
    print(
        f"{'':14} {'share':>8} {'unit':>8} {'peak':>8} {'anonymous':>9}   MB {'load':>6} {'read':>6} {'start':>6}",
        end="",
    )
    print(f" {'save':>6}   s {'load':>6} {'read':>6}   s of CPU")
    for name, each in found.items():
        sizes = " ".join(f"{value / 1e6:8.1f}" for value in each[:4])
        seconds = [" ".join(f"{value:6.2f}" for value in values) for values in (each[4:8], each[8:])]
        print(f"{name:14} {sizes}       {'     '.join(seconds)}", flush=True)


def main(arguments: list[str]) -> None:
    """All sides of the size that is asked for."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked = "quick" if "--quick" in arguments else arguments[-1] if "--size" in arguments else "1"
    size = SIZES[asked]
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINT_FOLDER")) as name:
        folder = Path(name)
        run_ranks(size.save, 1, folder / "pretrained", timeout=TIMEOUT)
        found = compare(folder / "pretrained", folder, size.rounds)
    show(found)
    plain, mapped = found["plain"], found["mapped"]

    def worst(ratio: Callable[[Figures, str], float]) -> float:
        return max(ratio(found[layout], layout) for layout in LAYOUTS)

    figures = {
        "peak_over_share": worst(lambda each, _: each.peak / each.share),
        "allowed": worst(lambda each, _: 1.1 + each.unit / each.share),
        "load_over_plain": worst(lambda each, _: each.load / plain.load),
        "read_over_plain": worst(lambda each, _: each.read / plain.load),
        "load_cpu_over_plain": worst(lambda each, _: each.load_cpu / plain.load_cpu),
        "read_cpu_over_plain": worst(lambda each, _: each.read_cpu / plain.load_cpu),
        "load_over_mapped": worst(lambda each, _: each.load / mapped.load),
        "startup_over_plain": worst(lambda each, layout: each.startup / found[f"{layout} at once"].startup),
        "save_over_plain": worst(lambda each, _: each.save / plain.save),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
