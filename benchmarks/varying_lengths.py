"""Batches of ever new lengths on two stages, beside batches of one length::

    python benchmarks/varying_lengths.py            # 200 lengths, about two minutes on two cores
    python benchmarks/varying_lengths.py --quick    # a few lengths: does it run?

An Accelerate script trains GPT-2 of Transformers on two stages with four microbatches, and evaluates it. Batches are
padded to their longest sample, so that nearly every length is new. A step is forward, backward and AdamW.

The last line is JSON:

* ``new_over_known``: seconds of a training step whose length is new, over one whose length came before, the median of
  the ratios. The first new lengths, which are run dry with symbols, are part of ``varying_over_fixed`` only.
* ``evaluation_new_over_known``: the same for forward passes.
* ``varying_over_fixed``: seconds of a whole epoch with a new length in each step, over those of steps of the same
  lengths in an epoch after it, in which every length is known. Both have the same work.
* ``varying_over_plain``: seconds of that first epoch, over those of one plain process; ``fixed_over_plain`` is the same
  for the second one.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from smp_strategy import SMPPlugin
from smp_strategy.testing import run_ranks

STAGES, MICROBATCHES, BATCH, VOCABULARY = 2, 4, 8, 500
# Calls with the first two lengths run dry.
FIRST = 3


class Size(NamedTuple):
    """Lengths of the batches."""

    shortest: int
    lengths: int
    evaluated: int


USUAL = Size(20, 200, 40)
QUICK = Size(20, 6, 4)


def script(size: Size, plugin: dict[str, Any] | None) -> dict[str, list[float]]:
    """Train and evaluate with all lengths, twice."""
    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True, parallelism_config=None if plugin is None else SMPPlugin(**plugin))
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    net = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=256, **ends))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))

    def train(length: int) -> None:
        ids = tokens(length)
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(length: int) -> None:
        with torch.no_grad():
            model(input_ids=tokens(length), use_cache=False)

    # In no order: a longer batch does not always follow a shorter one.
    order = torch.randperm(size.lengths, generator=torch.Generator().manual_seed(0)) + size.shortest
    lengths: list[int] = order.tolist()
    train(size.shortest + size.lengths)
    seconds = {name: [clocked(train, length) for length in lengths] for name in ("new", "known")}
    model.eval()
    evaluate(size.shortest + size.lengths)
    for name in ("new in evaluation", "known in evaluation"):
        seconds[name] = [clocked(evaluate, length) for length in lengths[: size.evaluated]]
    return seconds


def tokens(length: int) -> torch.Tensor:
    """A batch of this length."""
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(length))


def clocked(step: Callable[[int], None], length: int) -> float:
    """Seconds of a step."""
    begin = time.perf_counter()
    step(length)
    return time.perf_counter() - begin


def ratio(new: Sequence[float], known: Sequence[float]) -> float:
    """Median of the ratios, without those of the first lengths."""
    return median(one / other for one, other in zip(new[FIRST:], known[FIRST:], strict=True))


def main(size: Size) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    layout = {"pipeline_parallel_degree": STAGES, "microbatches": MICROBATCHES}
    ours = run_ranks(script, STAGES, size, layout, timeout=900.0)[0]
    (plain,) = run_ranks(script, 1, size, None, timeout=900.0)
    print(f"new: {1e3 * median(ours['new']):.1f} ms, known: {1e3 * median(ours['known']):.1f} ms")
    print(f"first new ones: {', '.join(f'{1e3 * each:.0f}' for each in ours['new'][:FIRST])} ms")
    figures = {
        "new_over_known": ratio(ours["new"], ours["known"]),
        "evaluation_new_over_known": ratio(ours["new in evaluation"], ours["known in evaluation"]),
        "varying_over_fixed": sum(ours["new"]) / sum(ours["known"]),
        "varying_over_plain": sum(ours["new"]) / sum(plain["new"]),
        "fixed_over_plain": sum(ours["known"]) / sum(plain["known"]),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main(QUICK if "--quick" in sys.argv[1:] else USUAL)
