"""The optimizer of all examples: AdamW with a warm-up and a half cosine.

Nothing here is parallel: the parameters that a pipeline rank does not hold have names and shapes all the same, so the
groups come out alike everywhere.
"""

import math
from dataclasses import dataclass

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler

__all__ = ["Recipe"]

FLOOR = 0.1  # the cosine ends at this part of the peak learning rate


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a module is optimized."""

    lr: float
    """Peak learning rate."""
    warmup_steps: int
    """Steps from 0 to the peak."""
    weight_decay: float
    """Decay of matrices; biases, gains and other vectors are left alone."""

    def build(self, module: L.LightningModule) -> OptimizerLRScheduler:
        """What ``configure_optimizers`` returns; the schedule ends with the trainer's last step."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim >= 2]
        vectors = [parameter for parameter in trained if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr, betas=(0.9, 0.95))
        num_steps = int(module.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate at ``step``, as a part of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
