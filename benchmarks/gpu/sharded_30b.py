"""Memory of one rank of a GPT-2 with 30 billion weights, sharded over 128, beside FSDP2::

    python benchmarks/gpu/sharded_30b.py

Hidden size 7168, 48 layers, 64 heads, a vocabulary of 50257, sequences of 2048, 6 samples per rank: what SageMaker's
model parallel library was published with at ``sharded_data_parallel_degree=128``, in float16 with activation
checkpointing, on GPUs of 40 GB (73.5 samples/s on 256 of them; docs/gpu.md). Here it is bfloat16 with float32 masters,
gradients and AdamW, on both sides.

The other 127 ranks do not exist: PyTorch's fake process group answers every collective at once, with nothing. So
memory is that of a real rank, and values and times mean nothing. Models begin on the meta device. The sides run one
after the other, each in a process of its own.

``peak`` is the most that was allocated in the second step (the first one makes the optimizer's state), ``at rest`` what
is allocated between steps. The last line is JSON: ``ours_gib``, ``fsdp2_gib``, ``ours_over_fsdp2``.
"""

from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Shape
from tables import Target, arguments, finish, show
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes the backend known)

from benchmarks.live_bytes import Baseline, peak_of
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine

GIB = 2**30
RANKS = 128


def main() -> None:
    """Measure both sides, and print."""
    options = arguments(__doc__, samples=6)
    rows, peaks = [], {}
    for name in SIDES:
        with get_context("spawn").Pool(1) as process:
            peaks[name], rest = process.apply(memory_of, (name, options.device, options.samples, options.tiny))
        rows.append([name, peaks[name] / GIB, rest / GIB])
    show(f"One of {RANKS} ranks, in GiB, on {options.device}", ["side", "peak", "at rest"], rows)
    ratio = peaks["smp"] / peaks["fsdp2"]
    figures = {"ours_gib": peaks["smp"] / GIB, "fsdp2_gib": peaks["fsdp2"] / GIB, "ours_over_fsdp2": ratio}
    finish({"device": options.device, **figures}, [Target("ours_over_fsdp2", 1.0, is_least=False)])


def memory_of(name: str, kind: str, samples: int, is_tiny: bool) -> tuple[int, int]:
    """Bytes at most, and at rest, of a side."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    shape = Shape(layers=48, width=7168, heads=64, length=2048, vocabulary=50257)
    ranks = RANKS
    if is_tiny:
        shape, ranks = Shape(layers=3, width=64, heads=4, length=8, vocabulary=500), 4
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    baseline = Baseline()
    with torch.device("meta"):
        model = GPT(shape)
    step = SIDES[name](model, shape.batch(samples, device), device, ranks)
    step()
    if device.type == "cpu":
        peak = peak_of(step, baseline.since())
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in baseline.since()}
        return peak, sum(storage.nbytes() for storage in storages.values())
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    step()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.memory_allocated(device)


def ours(model: GPT, batch: Tensor, device: torch.device, ranks: int) -> Callable[[], None]:
    """A step by the engine."""
    options: dict[str, Any] = {
        "bf16": True,
        "activation_checkpointing": "all",
        "delayed_parameter_initialization": True,
        # The ranks that do not exist seem to be on this GPU, too, and would share its memory.
        "memory_limit": "1TiB",
    }
    engine = Engine(SMPConfig(sharded_data_parallel_degree=ranks, **options), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    engine.attach(model, [optimizer])

    def step() -> None:
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss, reduces=True)
        optimizer.zero_grad()
        result.commit(torch.ones((), device=device), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        optimizer.zero_grad()

    return step


def fsdp2(model: GPT, batch: Tensor, device: torch.device, ranks: int) -> Callable[[], None]:
    """The same by FSDP2, in the same precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=dist.init_device_mesh(device.type, (ranks,)), mp_policy=policy)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = shard(checkpoint_wrapper(block))
    shard(model.tokens)
    shard(model.head)
    shard(model)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    # `loss` must pass through `forward`, where FSDP2 gathers.
    forward = torch.nn.functional.cross_entropy

    def step() -> None:
        logits = model(batch[:, :-1])
        forward(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


SIDES = {"smp": ours, "fsdp2": fsdp2}

if __name__ == "__main__":
    main()
