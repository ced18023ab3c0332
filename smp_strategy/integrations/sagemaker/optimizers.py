"""``smp.optimizers``: the fused optimizers of SageMaker's library, as ordinary ones."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FusedLAMB", "FusedNovoGrad"]


class FusedLAMB(Optimizer):
    """LAMB (You et al. 2020): Adam's direction with a trust ratio for each parameter.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: whether to correct the moments' bias.
        betas: factors of the running averages.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, inside of the trust ratio.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = self._direction(group, parameter)
                    weight, update = parameter.norm(), direction.norm()
                    ratio = torch.where((weight > 0) & (update > 0), weight / update, torch.ones_like(weight))
                    parameter.sub_(direction * ratio * group["lr"])
        return loss

    def _direction(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(parameter.grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        is_corrected, number = group["bias_correction"], state["step"]
        mean = state["exp_avg"] / ((1 - first**number) if is_corrected else 1)
        square = state["exp_avg_sq"] / ((1 - second**number) if is_corrected else 1)
        return mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter


class FusedNovoGrad(Optimizer):
    """NovoGrad (Ginsburg et al. 2019): gradients normalised by a second moment for each parameter.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: factors of the running averages.
        eps: added to the denominator.
        weight_decay: weight decay, added to the normalised gradient.
        grad_averaging: whether new gradients are weighted by ``1 - betas[0]``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, square = self.state[parameter], parameter.grad.square().sum()
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=square)
                else:
                    state["exp_avg_sq"] = state["exp_avg_sq"] * second + square * (1 - second)
                gradient = parameter.grad / (state["exp_avg_sq"].sqrt() + group["eps"])
                gradient = gradient + group["weight_decay"] * parameter
                gradient = gradient * (1 - first) if group["grad_averaging"] else gradient
                state["exp_avg"].mul_(first).add_(gradient)
                parameter.sub_(state["exp_avg"] * group["lr"])
        return loss
