"""One loss and its gradients of one process against the same with layers split over ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.plan.plan import SplitReport
from smp_strategy.tensor_parallel.sequence_parallel import SequenceParallel, chains
from smp_strategy.tensor_parallel.split import split_layers
from smp_strategy.testing import run_ranks

from .architecture import Architecture

__all__ = ["SplitComparison", "compare_split"]


@dataclass(frozen=True)
class SplitComparison:
    """What came out."""

    difference: float
    """Largest difference of the loss or of a gradient, relative to the largest element of that tensor, or to a
    thousandth of the largest of all, if that is more: some gradients are zero but for rounding."""
    where: str
    """The name of that tensor."""
    report: SplitReport
    apart: tuple[str, ...]
    """Parameters that are the same on all ranks, but not their gradients."""
    is_named_alike: bool
    """Whether parameters had the names of the dense model while layers were split."""
    is_dense_again: bool
    """Whether the state afterwards is that of the dense model, bit for bit, with all attributes of modules."""


def compare_split(
    architecture: Architecture, num_ranks: int, *, stream_dim: int | None = None, timeout: float = 120.0
) -> SplitComparison:
    """Run both; what rank 0 has seen."""
    found: SplitComparison = run_ranks(_on_rank, num_ranks, architecture, stream_dim, timeout=timeout)[0]
    return found


def _on_rank(architecture: Architecture, stream_dim: int | None) -> SplitComparison:
    dense = architecture.build()
    batch = architecture.batch(dense.model.config)
    loss = dense.step(batch)
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in dense.named_parameters() if p.grad is not None}}
    model = architecture.build()
    group = TensorGroup(dist.group.WORLD)
    split = split_layers(model, group)
    streams = []
    if stream_dim is not None:
        streams = [SequenceParallel(layers, group, dim=stream_dim) for layers in chains(model).values()]
        assert streams
    loss = model.step(batch)
    loss.backward()
    for stream in streams:
        stream.remove()
    is_named_alike = [n for n, _ in model.named_parameters()] == [n for n, _ in dense.named_parameters()]
    found, apart = {"loss": loss.detach()}, []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        parts = group.objects(parameter.grad)
        found[name] = split.cuts[parameter].join(parts) if parameter in split.cuts else parts[0]
        if parameter not in split.cuts and not all(torch.equal(part, parts[0]) for part in parts):
            apart.append(name)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    floor = max(gradient.abs().max().item() for gradient in expected.values()) / 1000
    differences = {
        name: (tensor - found[name]).abs().max().item() / max(tensor.abs().max().item(), floor)
        for name, tensor in expected.items()
    }
    where = max(differences, key=lambda name: differences[name])
    split.to_dense()
    before, after = dense.state_dict(), model.state_dict()
    is_dense_again = (
        list(before) == list(after)
        and all(torch.equal(before[name], after[name]) for name in before)
        and _attributes(model) == _attributes(dense)
    )
    return SplitComparison(differences[where], where, split.report, tuple(apart), is_named_alike, is_dense_again)


def _attributes(model: torch.nn.Module) -> list[tuple[str, type, dict[str, object]]]:
    plain = (bool, int, float, str)
    return [
        (name, type(module), {key: value for key, value in vars(module).items() if isinstance(value, plain)})
        for name, module in model.named_modules()
    ]
