"""What a pipeline rank pays for the units that it does not own.

Every rank runs the user's whole ``forward``, once per microbatch; calls of remote units are answered from predictions.
This times a forward of a 48-block GPT-2 (Hugging Face's) on a rank that owns none of its 52 units, and beside it, in
alternation, the model's own Python code with blocks that do nothing, which is the part that no pipeline can save::

    python benchmarks/glue.py [rounds]

The last line is JSON: ``glue_ms_48_blocks`` is the whole ghost forward, ``model_code_ms`` the model's own part of it,
``us_per_call`` the difference for each of the calls that were answered.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.units import choose_units
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.surveys import entered

NUM_BLOCKS = 48
CPU = torch.device("cpu")


def gpt2() -> GPT2LMHeadModel:
    """Small tensors: what is timed is Python."""
    config = GPT2Config(
        n_layer=NUM_BLOCKS, n_embd=32, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def ghost_forward(ids: torch.Tensor) -> tuple[Callable[[], Any], int]:
    """A forward on a rank without units, and the number of calls that it answers."""
    model, calls = gpt2(), UnitCalls()
    units = choose_units(model, 2)
    calls.intercept(units, model)
    stage = Stage(
        number=1,
        stage_of={unit.name: 0 for unit in units},
        num_stages=2,
        shape_inference=ShapeInference(CPU),
        transport=None,
        device=CPU,
    )
    calls.runtime = Runtime(stage, MicrobatchState([model], [unit.module for unit in units]))
    program = MicrobatchInterpreter(stage, microbatch=0)

    def forward(program: Any) -> None:
        assert calls.runtime is not None
        with entered(calls.runtime, program):
            model(input_ids=ids, labels=ids)
        program.program_trace.end()
        program.close()

    forward(program)
    return lambda: forward(MicrobatchInterpreter(stage, microbatch=0)), len(program.program_trace.events)


def bare_forward(ids: torch.Tensor) -> Callable[[], Any]:
    """The same model with blocks that return their input."""
    model = gpt2()
    for block in model.transformer.h:
        block.forward = lambda hidden, *args, **kwargs: hidden
    return lambda: model(input_ids=ids, labels=ids)


def milliseconds(function: Callable[[], Any]) -> float:
    """CPU time of one call, which other processes disturb less than its wall time."""
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e3


def main(rounds: int) -> None:
    """Alternate the two and print their medians."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    ids = torch.randint(0, 64, (2, 16))
    ghost, num_calls = ghost_forward(ids)
    bare = bare_forward(ids)
    for _ in range(10):
        ghost(), bare()
    times = [(milliseconds(ghost), milliseconds(bare)) for _ in range(rounds)]
    glue, own = (median(column) for column in zip(*times, strict=True))
    print(
        f"forward of {NUM_BLOCKS} blocks on a rank that owns none: {glue:.2f} ms, of which the model's own: {own:.2f}"
    )
    figures = {
        "glue_ms_48_blocks": round(glue, 3),
        "model_code_ms": round(own, 3),
        "us_per_call": round((glue - own) / num_calls * 1e3, 1),
        "calls": num_calls,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
