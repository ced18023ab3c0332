"""Words of the door that the user came through: calls of Lightning, Accelerate or SageMaker, in errors.

Parts that refuse something (a weight on another stage, a gradient in shards) do not know who has built them, but must
name the remedy as the user would write it. The integration says its words when a run begins; they belong to the process
group, like everything else about a run.
"""

from dataclasses import dataclass
from typing import Final, final
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["OF_ACCELERATE", "OF_LIGHTNING", "OF_SAGEMAKER", "DoorWords", "door_words", "speak"]


@final
@dataclass(frozen=True, kw_only=True)
class DoorWords:
    """Calls of a door, as parts of sentences."""

    in_hook: str
    """Where code sees all weights and gradients."""
    first_pass: str
    """Where the model is whole and can be called before training."""
    save_model: str
    """Call that saves all weights."""
    save_all: str
    """Call that saves weights and optimizers."""
    whole_state: str
    """Further way to the whole state of an optimizer, with a comma before it; may be empty."""
    on_one: str
    """Condition that is true on one rank only."""
    on_one_saves: str
    """Mistake of saving on one rank."""
    tell: str
    """Calls that log or print on one rank."""
    clip: str
    """Ways to clip gradients by their norm."""
    average: str
    """Ways to average a value over all ranks."""
    end_of_run: str
    """Call that ends a run."""


OF_LIGHTNING: Final = DoorWords(
    in_hook="in a hook of Lightning",
    first_pass="in `setup` or `configure_model` of the LightningModule",
    save_model="`trainer.save_checkpoint` or `model.save_pretrained`",
    save_all="`trainer.save_checkpoint`",
    whole_state="",
    on_one="if trainer.is_global_zero: ",
    on_one_saves="`if trainer.is_global_zero: trainer.save_checkpoint(...)`",
    tell="`self.log` or `self.print`",
    clip="`gradient_clip_val`",
    average="`self.log(..., sync_dist=True)`",
    end_of_run="`trainer.fit`",
)
OF_ACCELERATE: Final = DoorWords(
    in_hook="in `accelerator.smp.with_weights(lambda: ...)` on all ranks",
    first_pass="before `accelerator.prepare`, or before the Trainer gets it",
    save_model="`model.save_pretrained` or `accelerator.get_state_dict(model)`",
    save_all="`accelerator.save_state`",
    whole_state=", or `state_dict()` of the optimizer that `accelerator.prepare` has returned",
    on_one="if accelerator.is_main_process: ",
    on_one_saves="`if accelerator.is_main_process: accelerator.save_state()`",
    tell="`accelerator.log` or `accelerator.print`",
    clip="`accelerator.clip_grad_norm_`",
    average='`accelerator.reduce(value, "mean")`',
    end_of_run="`accelerator.end_training()`",
)
OF_SAGEMAKER: Final = DoorWords(
    in_hook="in a function with `@smp.step`",
    first_pass="before `smp.DistributedModel`",
    save_model="`smp.save_checkpoint(path, tag, partial=False)` or `model.state_dict()`",
    save_all="`smp.save_checkpoint`",
    whole_state=", or `state_dict()` of the optimizer that `smp.DistributedOptimizer` has returned",
    on_one="if smp.rank() == 0: ",
    on_one_saves="`if smp.rank() == 0: smp.save_checkpoint(...)`",
    tell="`StepOutput.reduce_mean()` outside of the step",
    clip="`optimizer.clip_master_grads`",
    average="`torch.distributed.all_reduce(value)`",
    end_of_run="the run",
)
_OF_BOTH: Final = DoorWords(
    in_hook="in a hook of Lightning or in `accelerator.smp.with_weights(lambda: ...)` on all ranks",
    first_pass="before training",
    save_model="`trainer.save_checkpoint`, `model.save_pretrained` or `accelerator.get_state_dict(model)`",
    save_all="`trainer.save_checkpoint` or `accelerator.save_state`",
    whole_state=OF_ACCELERATE.whole_state,
    on_one=OF_LIGHTNING.on_one,
    on_one_saves=f"{OF_LIGHTNING.on_one_saves} or {OF_ACCELERATE.on_one_saves}",
    tell=f"{OF_LIGHTNING.tell}, or {OF_ACCELERATE.tell}",
    clip="`gradient_clip_val`, or `accelerator.clip_grad_norm_`",
    average=f"{OF_LIGHTNING.average}, or {OF_ACCELERATE.average}",
    end_of_run=f"{OF_LIGHTNING.end_of_run} or {OF_ACCELERATE.end_of_run}",
)

_WORDS: Final[WeakKeyDictionary[dist.ProcessGroup, DoorWords]] = WeakKeyDictionary()


def speak(words: DoorWords) -> None:
    """Use ``words`` in errors from now on, for as long as the default process group lives."""
    world = dist.group.WORLD
    assert world is not None
    _WORDS[world] = words


def door_words() -> DoorWords:
    """Words for an error; those of both doors if none has begun a run."""
    world = dist.group.WORLD
    return _OF_BOTH if world is None else _WORDS.get(world, _OF_BOTH)
