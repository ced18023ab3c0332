"""Optimizers that train one point and have an average evaluated, and exchange them in ``train`` and ``eval``.

The exchange changes all weights by what is kept for each of them, so ranks do it together, each with those that it
updates (Defazio et al. 2024).
"""

from torch.optim import Optimizer

__all__ = ["MODES", "has_to_switch"]

MODES = ("train", "eval")


def has_to_switch(optimizer: Optimizer, mode: str) -> bool:
    """Whether a call of the method ``mode`` has anything to change."""
    wanted = {group.get("train_mode", mode != "train") for group in optimizer.param_groups}
    return callable(getattr(optimizer, mode, None)) and wanted != {mode == "train"}
