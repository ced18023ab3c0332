"""Memory of training a model like Llama on stages and in shard groups, over that of one plain process::

    python benchmarks/training_memory.py              # 0.3 billion parameters
    python benchmarks/training_memory.py --size 100   # 97 million
    python benchmarks/training_memory.py --quick      # some thousand: does it run?
    python benchmarks/training_memory.py fp32 lora    # some kinds of training only
    MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 python benchmarks/training_memory.py

With the last line freed memory goes back to the system.

Lightning trains for two steps of AdamW with the same global batch: all weights or LoRA of PEFT, in float32 or under
``precision="bf16-mixed"``. Weights are random. Ranks read their shares of files
(``delayed_parameter_initialization``); the plain process makes its model in memory.

The measured memory is the growth of a process's anonymous memory, from before the model is built to the most that a
sample found (every 2 ms), less the same of a process that trains a model of some thousand parameters: modules that are
imported on the way, buffers of sockets. Memory that ranks share (messages of stages, parts of shards) has a column of
its own: shared pages count once, divided among the ranks that map them (``Pss_Shmem``).

``over plain`` is the fullest rank's memory of both kinds over the plain process's, ``predicted`` the fullest rank of
the partition that the run has chosen (``explain()``) over what it really took. The last line is JSON: of each layout
the worst of both over the kinds of training; a prediction is worst where it is farthest from 1.
"""

import itertools
import json
import logging
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import peft
import torch
import transformers
from pretrained import TIMEOUT, resident
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from smp_strategy import SMPStrategy
from smp_strategy.testing import run_ranks

SAMPLES, LENGTH, STEPS = 8, 64, 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": SAMPLES}),
    "pp4": (4, {"pipeline_parallel_degree": 4, "microbatches": SAMPLES}),
    "sdp2": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}),
    "sdp4": (4, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 4}),
}
# Precision, and whether adapters are trained.
KINDS = {
    "fp32": ("32-true", False),
    "bf16": ("bf16-mixed", False),
    "lora": ("32-true", True),
    "bf16-lora": ("bf16-mixed", True),
}


class Size(NamedTuple):
    """Size of the model."""

    layers: int
    width: int
    vocabulary: int

    def model(self) -> LlamaForCausalLM:
        """A model of this size."""
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.width,
                intermediate_size=11 * self.width // 4,
                num_hidden_layers=self.layers,
                num_attention_heads=8,
                num_key_value_heads=8,
            )
        )

    def save(self, folder: Path) -> None:
        """Write a model of this size into safetensors files."""
        self.model().save_pretrained(folder)


SIZES = {"quick": Size(4, 16, 64), "100": Size(12, 640, 24_000), "300": Size(20, 1024, 24_000)}


class Run(NamedTuple):
    """A way to train."""

    size: Size
    kind: str
    layout: str | None
    """``None``: one plain process."""


class Found(NamedTuple):
    """Bytes of a rank."""

    anonymous: int
    shared: int
    predicted: int

    @property
    def total(self) -> int:
        """Bytes of both kinds."""
        return self.anonymous + self.shared


class Growth(L.Callback):
    """The most that the resident memory of this process has grown since the model was made.

    No attribute of the module: a step would be seen to change it, and microbatches would run one after the other.
    """

    def __init__(self) -> None:
        self._before = self._most = self._most_shared = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._before = resident("RssAnon")
        self._thread.start()

    def _sample(self) -> None:
        # The kernel keeps no peak of anonymous memory alone.
        for number in itertools.count():
            if self._is_over.wait(0.002):
                return
            self._most = max(self._most, resident("RssAnon") - self._before)
            if number % 100 == 0:  # the kernel walks over all pages to find these; they stay for several steps
                self._most_shared = max(self._most_shared, shared())

    def end(self) -> list[int]:
        """Anonymous and shared bytes."""
        self._is_over.set()
        self._thread.join()
        return [self._most, self._most_shared]


def shared() -> int:
    """Bytes of shared pages of this process, divided by the number of processes that map them."""
    found = re.search(r"Pss_Shmem: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


class Tuned(L.LightningModule):
    """Trains a model of this size, from ``folder`` if there is one, or adapters of it."""

    def __init__(self, size: Size, folder: Path | None, *, adapts: bool) -> None:
        super().__init__()
        self.size, self.folder, self.adapts = size, folder, adapts
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            # A plain process would map the files, and pages that are only read are not anonymous.
            is_plain = self.folder is None
            model: Any = self.size.model() if is_plain else AutoModelForCausalLM.from_pretrained(self.folder)
            if self.adapts:
                model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
            self.model = model.train()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-4)


def train(run: Run, folder: Path) -> Found:
    """Train, on one of the ranks of the layout."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    precision, adapts = KINDS[run.kind]
    ranks, options = (1, {}) if run.layout is None else LAYOUTS[run.layout]
    strategy: Any = "auto"
    growth = Growth()
    if run.layout is not None:
        strategy = SMPStrategy(**options, delayed_parameter_initialization=True, smp_report="quiet")
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        precision=precision,
        callbacks=[growth],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    weights = None if run.layout is None else folder / str(run.size.layers)
    module = Tuned(run.size, weights, adapts=adapts)
    tokens = torch.randint(0, run.size.vocabulary, (SAMPLES * STEPS, LENGTH))
    replicas = options.get("sharded_data_parallel_degree", 1)
    trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=SAMPLES // replicas))
    anonymous, shared = growth.end()
    predicted = 0
    if run.layout is not None:
        predicted = max(stage.memory_bytes for stage in strategy.engine.partition.stages)
    return Found(anonymous, shared, predicted)


def fullest(run: Run, folder: Path) -> Found:
    """The most of all ranks, less what a run takes whose model is tiny."""
    ranks = 1 if run.layout is None else LAYOUTS[run.layout][0]

    def most(each: Run) -> Found:
        return Found(*map(max, zip(*run_ranks(train, ranks, each, folder, timeout=TIMEOUT), strict=True)))

    empty, found = most(run._replace(size=SIZES["quick"])), most(run)
    return found._replace(anonymous=found.anonymous - empty.anonymous, shared=max(0, found.shared - empty.shared))


def compare(size: Size, kinds: Sequence[str], folder: Path) -> dict[str, dict[str, Found]]:
    """By kind of training and layout, with the plain process as ``plain``."""
    found: dict[str, dict[str, Found]] = {}
    print("| training | layout | MB | over plain | shared, MB | predicted over real |\n|---|---|---|---|---|---|")
    for kind in kinds:
        for layout in (None, *LAYOUTS):
            begin = time.perf_counter()
            one = found.setdefault(kind, {})[layout or "plain"] = fullest(Run(size, kind, layout), folder)
            ratio = f"{over(one, found[kind]['plain']):.2f}"
            predicted = f"{one.predicted / max(one.total, 1):.2f}" if layout else "-"
            sizes = f"{one.anonymous / 1e6:.0f} | {ratio} | {one.shared / 1e6:.0f}"
            print(f"| {kind} | {layout or 'plain'} | {sizes} | {predicted} |", flush=True)
            print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def over(one: Found, plain: Found) -> float:
    """Memory over that of the plain process."""
    return one.total / max(plain.total, 1)


def worst(found: Mapping[str, Mapping[str, Found]]) -> dict[str, float]:
    """Of each layout."""
    figures = {}
    for layout in LAYOUTS:
        of_kinds = [(kind[layout], kind["plain"]) for kind in found.values()]
        figures[layout] = max(over(one, plain) for one, plain in of_kinds)
        ratios = [max(one.predicted, 1) / max(one.total, 1) for one, _ in of_kinds]
        figures[f"predicted_{layout}"] = max(ratios, key=lambda ratio: abs(log(ratio)))
    return figures


def main(arguments: list[str]) -> None:
    """All kinds of training that are asked for."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked = "quick" if "--quick" in arguments else "100" if "100" in arguments else "300"
    size = SIZES[asked]
    kinds = [kind for kind in KINDS if kind in arguments] or list(KINDS)
    with torch.device("meta"):
        print(f"{sum(each.numel() for each in size.model().parameters()) / 1e6:.1f} million parameters", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for each in (SIZES["quick"], size):
            run_ranks(each.save, 1, Path(name) / str(each.layers), timeout=TIMEOUT)
        found = compare(size, kinds, Path(name))
    print(json.dumps({name: round(value, 3) for name, value in worst(found).items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
