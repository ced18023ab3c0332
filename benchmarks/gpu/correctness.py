"""Layouts on an accelerator give the numbers of one process on it::

    python benchmarks/gpu/correctness.py            # two ranks share one GPU over gloo, by way of the host

For models of the parity tests, after some steps of SGD with momentum: losses and weights of one plain process on the
same device, which accumulates over the same microbatches, beside those of one rank under the engine, of two pipeline
stages, under two schedules, and with activations that are offloaded and computed again, of two ranks over which
everything is sharded, and of two that split layers. All ranks compute on the same device, with deterministic kernels.

``worst`` is the largest difference of a weight relative to its tensor's largest element. Pipelines should differ by
nothing, unless sums are added up in another order: what stages add apart (docs/pipeline.md), and gradients that a shard
group adds up after each microbatch, by 1e-6; split layers by at most 1e-5.

The last line is JSON: ``cases``, ``exact`` (bit for bit), ``within`` (what its layout promises), ``worst``.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tables import Target, arguments, finish, show
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for

STEPS, SAMPLES, MICROBATCHES = 3, 8, 4
LOSS_TOLERANCE = 1e-5
NAMES = ("text", "text, tied", "skips", "weights in the glue", "forked")


class Layout(NamedTuple):
    """How ranks share out the work."""

    options: Mapping[str, Any]
    ranks: int
    tolerance: float


# Units are computed again from inputs that have been in host memory.
LESS = {
    "activation_checkpointing": "all",
    "offload_activations": True,
    "offload_min_bytes": 0,
    "activation_loading_horizon": 1,
}
LAYOUTS = {
    "one rank": Layout({}, 1, 0.0),
    "pp=2": Layout({"pipeline_parallel_degree": 2}, 2, 0.0),
    "pp=2, less activations": Layout({"pipeline_parallel_degree": 2, **LESS}, 2, 0.0),
    "pp=2, zb-h1": Layout({"pipeline_parallel_degree": 2, "pipeline": "zb-h1"}, 2, 1e-6),
    "sdp=2": Layout({"sharded_data_parallel_degree": 2}, 2, 1e-6),
    "pp=2, sdp=2": Layout({"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2}, 4, 0.0),
    "tp=2": Layout({"tensor_parallel_degree": 2, "prescaled_batch": True}, 2, 1e-5),
}
# Models with sums that are added up apart.
INEXACT = {"text, tied": 1e-6, "weights in the glue": 1e-6}

Outcome = tuple[list[float], dict[str, Tensor]]


def main() -> None:
    """Compare and print."""
    options = arguments(__doc__)
    names = NAMES[:2] if options.tiny else NAMES
    layouts = dict(list(LAYOUTS.items())[:2]) if options.tiny else LAYOUTS
    rows, worst, num_exact, num_within = [], 0.0, 0, 0
    for name in names:
        plain = {}
        for title, layout in layouts.items():
            replicas = layout.options.get("sharded_data_parallel_degree", 1)
            if replicas not in plain:
                # In a process of its own as well: one that has used the device cannot be forked.
                plain[replicas] = run_ranks(one_process, 1, name, options.device, replicas)[0]
            found = run_ranks(one_rank, layout.ranks, name, layout.options, options.device)[0]
            difference = difference_of(plain[replicas], found)
            allowed = max(layout.tolerance, INEXACT.get(name, 0.0))
            rows.append([name, title, layout.ranks, difference, allowed, "yes" if difference <= allowed else "NO"])
            worst, num_exact = max(worst, difference), num_exact + (difference == 0.0)
            num_within += difference <= allowed
    show("Weights and losses against one process", ["model", "layout", "ranks", "worst", "allowed", "right"], rows)
    figures = {"device": options.device, "cases": len(rows), "exact": num_exact, "within": num_within, "worst": worst}
    finish(figures, [Target("within", len(rows), is_least=True)])


def one_process(name: str, kind: str, replicas: int) -> Outcome:
    """A plain loop, microbatch by microbatch; the gradients of replicas are averaged."""
    device, model, optimizer = begin(name, kind)
    losses = []
    for step in range(STEPS):
        totals: dict[nn.Parameter, Tensor] = {}
        for replica in range(replicas):
            optimizer.zero_grad()
            losses.append(0.0)
            parts, sizes = split(batch_on(device, name, step * replicas + replica), MICROBATCHES)
            for part, size in zip(parts, sizes, strict=True):
                loss = model.loss(part) * (size / sum(sizes))
                loss.backward()
                losses[-1] += loss.item()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    share = parameter.grad / replicas
                    totals[parameter] = totals[parameter] + share if parameter in totals else share
        for parameter, total in totals.items():
            parameter.grad = total
        optimizer.step()
    return losses[::replicas], on_host(model.state_dict())


def one_rank(name: str, options: Mapping[str, Any], kind: str) -> Outcome:
    """What one of several ranks does, each on the same device."""
    device, model, optimizer = begin(name, kind)
    engine = Engine(SMPConfig(microbatches=MICROBATCHES, **options), device=device)
    engine.attach(model, [optimizer])
    losses = []
    for step in range(STEPS):
        batch = batch_on(device, name, step * engine.mesh.dp + engine.mesh.dp_rank)
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones((), device=device), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
    return losses, on_host(engine.saved.full_state_dict())


def begin(name: str, kind: str) -> tuple[torch.device, nn.Module, torch.optim.Optimizer]:
    """The model, alike everywhere; kernels that add in one order only."""
    torch.use_deterministic_algorithms(True)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    torch.manual_seed(0 if not dist.is_initialized() else dist.get_rank())  # rank 0's initial values count
    model = MODELS[name]().to(device)
    return device, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def batch_on(device: torch.device, name: str, step: int) -> Any:
    """Data of a step."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch_for(name, step, SAMPLES))


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the device, which means nothing to the process that compares."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def difference_of(plain: Outcome, found: Outcome) -> float:
    """The largest of the weights, relative. (Losses are added up in another way, so they are only checked.)"""
    assert plain[1].keys() == found[1].keys()
    for one, other in zip(plain[0], found[0], strict=True):
        assert abs(one - other) <= LOSS_TOLERANCE * abs(one), f"losses {plain[0]} and {found[0]}"
    differences = []
    for name, expected in plain[1].items():
        if expected.is_floating_point() and expected.numel():
            scale = max(float(expected.abs().max()), 1e-30)
            differences.append(float((expected - found[1][name]).abs().max()) / scale)
    return max(differences)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)  # processes are forked
    main()
