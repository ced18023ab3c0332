"""What it costs to run a stage's backward in two parts, as zero-bubble schedules do, and not as a whole.

The stage is four blocks of GPT-2 (Hugging Face's, hidden size 384), one sample of 128 tokens, one thread. The two ways
alternate; times are those of the thread, so that a busy machine disturbs them less::

    python benchmarks/split_backward.py [rounds]

The last line is JSON: ``ratio_to_whole`` is the time of both parts over that of the whole, ``input_ms`` and
``weight_ms`` are the parts, ``whole_ms`` the whole.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import quantiles

import torch
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from smp_strategy.pipeline.segments import Import, enter
from smp_strategy.pipeline.split_backward import backward_of_imports

HIDDEN, LENGTH, BLOCKS, WARM_UP = 384, 128, 4, 3


def timed(function: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.thread_time()
    function()
    return 1e3 * (time.thread_time() - start)


def measure(rounds: int, width: int = HIDDEN) -> dict[str, float]:
    """Times of a backward as a whole, and of its two parts."""
    config = GPT2Config(n_embd=width, n_head=6, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    blocks = nn.ModuleList(GPT2Block(config, layer_idx=number) for number in range(BLOCKS))
    x, gradient = torch.randn(1, LENGTH, width), torch.randn(1, LENGTH, width)

    def forward() -> tuple[Tensor, Import]:
        record = Import(0, None)
        hidden = enter(x, record)
        for block in blocks:
            out = block(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden, record

    found: list[tuple[float, float, float]] = []
    for _ in range(rounds + WARM_UP):
        hidden, _record = forward()
        whole = timed(lambda: torch.autograd.backward([hidden], [gradient]))  # noqa: B023
        hidden, record = forward()
        deferred = []
        first = timed(lambda: deferred.append(backward_of_imports([hidden], [gradient], {record})))  # noqa: B023
        found.append((whole, first, timed(deferred[0].run)))
    whole, first, second = (quantiles(times, n=5)[0] for times in zip(*found[WARM_UP:], strict=True))
    return {"whole_ms": whole, "input_ms": first, "weight_ms": second, "ratio_to_whole": (first + second) / whole}


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps({name: round(value, 3) for name, value in measure(rounds).items()}))


if __name__ == "__main__":
    main()
