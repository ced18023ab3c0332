"""How much faster is a step under our partition than under those of others?

Six models are traced without memory (their weights are on the meta device), their calls are priced by the same model of
a GPU, and each partition is simulated with four microbatches per stage, under the schedule that suits it better: 1F1B,
or SageMaker's own (``interleaved``), because its partitions go back to the first stage for what follows the blocks::

    python -m benchmarks.partition            # all models on 2, 4 and 8 stages; the table of docs/partitioning.md
    python -m benchmarks.partition vit 2      # some of them, by name and number of stages

*tree* is SageMaker's algorithm with the better of its two settings (``memory_weight`` 0.2 and 0.8). *equal* is what
libraries without a cost model do: the same number of blocks on each stage, what comes before the blocks on the first
one and what comes after them on the last one. *Ours* is the fastest partition (``memory_weight`` 0); the last two
columns are the partition of the default, ``optimize="speed"``, whose objective weighs memory by 0.2, beside the
fastest one, both under 1F1B: what it adds to the time, and what it saves of the memory of the fullest stage.

The last line of the output is JSON; ``max_gap`` is the most that any contiguous partition could still gain on ours,
``default_slower`` the most that the default adds, ``default_saves`` the mean of what it saves.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.commands.offline_planning import trace_program
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.partition.sagemaker_tree import in_execution_order, module_tree, tree_partition
from smp_strategy.planning.planner import PlanningInput, best_partition, problem_under, simulated
from smp_strategy.planning.schedule.policies import Policy

__all__ = ["MODELS", "main", "program_of"]

META = torch.device("meta")
STAGES = (2, 4, 8)
POLICIES = (Policy("1f1b"), Policy("interleaved"))


class UNet(nn.Module):
    """Five levels down and up, with a skip connection on each."""

    def __init__(self, width: int = 64, levels: int = 5) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem = _convolutions(3, width)
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.up = nn.ModuleList(_convolutions(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(nn.functional.max_pool2d(x, 2))
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return nn.functional.cross_entropy(self.head(x), labels)


def _convolutions(inputs: int, outputs: int) -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
        for channels in (inputs, outputs)
    ]
    return nn.Sequential(*layers)


def _tokens(samples: int, length: int) -> Tensor:
    return torch.zeros(samples, length, dtype=torch.int64, device=META)


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 small, weights tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), {"input_ids": _tokens(4, 512), "labels": _tokens(4, 512)}


def huge_vocabulary() -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT-2 with 24 blocks and the 256 000 words of a multilingual model, weights not tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256_000, n_layer=24, n_embd=1024, n_head=16, tie_word_embeddings=False)
    return GPT2LMHeadModel(config), {"input_ids": _tokens(4, 512), "labels": _tokens(4, 512)}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    images = torch.zeros(16, 3, 224, 224, device=META)
    config = ViTConfig()
    config.num_labels = 1000
    model = ViTForImageClassification(config)
    return model, {"pixel_values": images, "labels": _tokens(16, 1)[:, 0]}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """T5 base: an encoder whose result all blocks of the decoder use."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(4, 512), "labels": _tokens(4, 128)}


def resnet50() -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-50: four levels of blocks that cost less and hold more as one goes down."""
    from transformers import ResNetConfig, ResNetForImageClassification

    images = torch.zeros(32, 3, 224, 224, device=META)
    config = ResNetConfig()
    config.num_labels = 1000
    model = ResNetForImageClassification(config)
    return model, {"pixel_values": images, "labels": _tokens(32, 1)[:, 0]}


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    """A U-Net for images of 256 by 256 pixels."""
    labels = torch.zeros(8, 256, 256, dtype=torch.int64, device=META)
    return UNet(), {"pixel_values": torch.zeros(8, 3, 256, 256, device=META), "labels": labels}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "gpt2": gpt2,
    "vit": vit,
    "t5": t5,
    "resnet50": resnet50,
    "unet": unet,
    "huge_vocabulary": huge_vocabulary,
}


def program_of(name: str, config: SMPConfig, num_stages: int) -> PlanningInput:
    """A microbatch of the model, priced."""
    with META:
        module, batch = MODELS[name]()

    def step(microbatch: Any) -> Any:
        result = module(**microbatch)
        return result if isinstance(result, Tensor) else result.loss

    return trace_program(config, module, step, batch, num_stages=num_stages, machine="cuda")


def equal_layers(names: Sequence[str], num_stages: int) -> dict[str, int]:
    """Blocks (modules in a list, by the number in their name) divided evenly, all others with the nearest of them."""
    blocks = [index for index, name in enumerate(names) if any(part.isdigit() for part in name.split("."))]
    if len(blocks) < num_stages:
        blocks = list(range(len(names)))
    number, stage_of = 0, {}
    for index, name in enumerate(names):
        if index in blocks:
            number += 1
        stage_of[name] = max(number - 1, 0) * num_stages // len(blocks)
    return stage_of


@dataclass(frozen=True)
class Row:
    """A model on a number of stages: milliseconds of a step under each partition."""

    model: str
    num_stages: int
    num_units: int
    ours: float
    tree: float
    equal: float
    gap: float
    planning_seconds: float
    added: float
    """Share of the time that the default adds."""
    saved: float
    """Share of the memory that it saves."""

    def __str__(self) -> str:
        gains = [f"{other:.1f} (+{other / self.ours - 1:.1%})" for other in (self.tree, self.equal)]
        return (
            f"| {self.model} | {self.num_stages} | {self.num_units} | {self.ours:.1f} | {gains[0]} | {gains[1]} | "
            f"{self.gap:.1%} | {self.planning_seconds:.1f} | {self.added:.1%} | {self.saved:.1%} |"
        )


def compare(model: str, num_stages: int) -> Row:
    """Plan and simulate."""
    config = SMPConfig(pipeline_parallel_degree=num_stages, microbatches=4 * num_stages, memory_weight=0.0)
    program = program_of(model, config, num_stages)

    def milliseconds(stage_of: Mapping[str, int]) -> float:
        problems = {policy: problem_under(config, program, num_stages, policy) for policy in POLICIES}
        scores = [simulated(program, problem, policy, stage_of) for policy, problem in problems.items()]
        return 1e3 * min(score.step_seconds for score in scores)

    start = time.process_time()
    best = best_partition(config, program, num_stages, policies=POLICIES)
    seconds = time.process_time() - start
    fastest, default = (
        best_partition(replace(config, memory_weight=weight), program, num_stages, policies=POLICIES[:1])
        for weight in (0.0, None)
    )
    units = problem_under(config, program, num_stages, POLICIES[0]).units
    names = [unit.name for unit in units]
    trees = [tree_partition(module_tree(units), num_stages, weight) for weight in (0.2, 0.8)]
    return Row(
        model,
        num_stages,
        len(units),
        milliseconds(best.stage_of),
        min(milliseconds(in_execution_order(tree, names)) for tree in trees),
        milliseconds(equal_layers(names, num_stages)),
        best.gap,
        seconds,
        default.step_seconds / fastest.step_seconds - 1,
        1 - _peak(default) / _peak(fastest),
    )


def _peak(partition: Partition) -> int:
    return max(stage.memory_bytes for stage in partition.stages)


def main(models: Sequence[str], stages: Sequence[int]) -> None:
    """Print the table and the figures."""
    others = "SageMaker's tree | equal layers | at most better by"
    print(f"| model | stages | units | ours, ms | {others} | planning, s | default adds | saves |")
    print("|" + "---|" * 10)
    rows = []
    for model in models:
        for num_stages in stages:
            rows.append(compare(model, num_stages))
            print(rows[-1], flush=True)
    figures = {
        "never_worse": all(row.ours <= min(row.tree, row.equal) * (1 + 1e-9) for row in rows),
        "mean_gain_vs_tree": round(mean(row.tree / row.ours - 1 for row in rows), 4),
        "mean_gain_vs_equal": round(mean(row.equal / row.ours - 1 for row in rows), 4),
        "max_gap": round(max(row.gap for row in rows), 4),
        "default_slower": round(max(row.added for row in rows), 4),
        "default_saves": round(mean(row.saved for row in rows), 4),
        "planning_seconds_max": round(max(row.planning_seconds for row in rows), 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    torch.set_num_threads(1)
    main(names or list(MODELS), numbers or STAGES)
