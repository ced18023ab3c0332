"""Which Hugging Face models can be filled on ranks that hold a part of them, and as their constructors fill them?

    python -m benchmarks.delayed                       # all of the table in tests/parity/huggingface
    python -m benchmarks.delayed GPT2LMHeadModel ...   # those that are named

Each tiny model is built on the meta device and filled unit by unit, and once more at once: the values must be equal.
Buffers must be those of the constructor; of parameters mean and deviation are compared within what chance allows. The
last line of the output is the score, as JSON.
"""

import json
import sys
import warnings
from collections import Counter

import torch
import transformers
from torch import Tensor, nn

from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.units import choose_units
from tests.parity.huggingface.architecture import Architecture
from tests.parity.huggingface.table import ARCHITECTURES

__all__ = ["main"]

CPU = torch.device("cpu")
# So many standard errors are no chance, also where thousands of tensors are compared.
MOST_ERRORS = 7.0
FEWEST_ELEMENTS = 16


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = {each.name: each for each in ARCHITECTURES if not names or each.name in names}
    found: Counter[str] = Counter()
    for name, architecture in sorted(chosen.items()):
        verdict, reason = judge(architecture)
        found[verdict] += 1
        print(f"{name:48} {verdict:10} {reason}", flush=True)
    print(
        json.dumps({"models": len(chosen), **{verdict: found[verdict] for verdict in ("filled", "refused", "differs")}})
    )


def judge(architecture: Architecture) -> tuple[str, str]:
    """Whether it is filled as by its constructor, or refused, and why."""
    try:
        in_parts, at_once = (filled(architecture, by_unit=by_unit) for by_unit in (True, False))
    except UnsupportedError as error:
        return "refused", " ".join(str(error).split())[100:250]
    expected = architecture.build()
    buffers = dict(expected.named_buffers())
    for name, tensor in {**dict(expected.named_parameters()), **buffers}.items():
        mine = in_parts[name]
        if not torch.equal(mine, at_once[name]):
            return "differs", f"`{name}` depends on the layout"
        if not (torch.equal(mine, tensor) if name in buffers else are_alike(mine, tensor)):
            return "differs", f"`{name}` is not that of the constructor"
    return "filled", ""


def filled(architecture: Architecture, *, by_unit: bool) -> dict[str, Tensor]:
    """Its tensors."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = architecture.build()
    units = choose_units(model, 2) if by_unit else []
    delayed = DelayedModule(model, 0, CPU)
    delayed.prepare(units)
    for tensors in delayed.parts(units).values():
        delayed.materialise(tensors)
    assert not delayed.is_pending
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def are_alike(mine: Tensor, other: Tensor) -> bool:
    """Whether both may be drawn from the same distribution."""
    if mine.numel() < FEWEST_ELEMENTS:
        return True
    deviations, means = [each.double().std().item() for each in (mine, other)], [mine.mean(), other.mean()]
    error = max(deviations) / mine.numel() ** 0.5
    tolerance = MOST_ERRORS * error + 1e-9
    return abs(deviations[0] - deviations[1]) <= tolerance and abs(float(means[0] - means[1])) <= 2 * tolerance


if __name__ == "__main__":
    main(sys.argv[1:])
