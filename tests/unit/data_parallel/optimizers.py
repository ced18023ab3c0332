"""Optimizers as users bring them: some go by elements, others by whole tensors, each in a way of its own."""

from typing import Any

import torch
from torch import Tensor, optim


def evaluate(closure: Any) -> None:
    """What optimizers begin their step with, where a closure evaluates the loss."""
    if closure is not None:
        with torch.enable_grad():
            closure()


class OneByOne(optim.Optimizer):
    """Base of those that update one parameter after the other: each that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])

    def update(self, p: Tensor, lr: float) -> None:
        """A step of ``p``, which has a gradient."""
        raise NotImplementedError


class Lion(OneByOne):
    """Elements (Chen et al. 2023)."""

    def update(self, p: Tensor, lr: float) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        p.sub_(torch.lerp(p.grad, mean, 0.9).sign_(), alpha=lr)
        mean.lerp_(p.grad, 0.01)


class Lamb(OneByOne):
    """Norms of each tensor (You et al. 2020)."""

    def update(self, p: Tensor, lr: float) -> None:
        state = self.state[p]
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad**2, 0.01)
        update = mean / (square.sqrt() + 1e-6)
        ratio = p.norm() / update.norm().clamp(min=1e-6) if p.numel() else 1.0
        p.sub_(lr * ratio * update)


class LateShampoo(OneByOne):
    """Statistics of matrices, which are used from the hundredth step on (Gupta et al. 2018)."""

    def update(self, p: Tensor, lr: float) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        update = p.grad
        if p.ndim == 2:
            left = state.setdefault("left", p.new_zeros(len(p), len(p))).addmm_(p.grad, p.grad.T)
            if state["step"] > 100:
                update = torch.linalg.inv(left) @ update
        p.sub_(lr * update)


class DecaysMatrices(OneByOne):
    """Number of dims."""

    def update(self, p: Tensor, lr: float) -> None:
        if p.ndim > 1:
            p.mul_(1 - 0.01 * lr)
        p.sub_(p.grad, alpha=lr)


class WholeBlocks(OneByOne):
    """Blocks of 256 elements, as in optimizers that keep 8 bits; small tensors are treated by elements."""

    def update(self, p: Tensor, lr: float) -> None:
        gradient = p.grad.reshape(-1)
        if len(gradient) >= 4096:
            gradient = torch.cat([block.abs().max() * block.sign() for block in gradient.split(256)])
        p.sub_(gradient.view_as(p), alpha=lr)


class PassesOverEmpty(Lion):
    """Keeps nothing for what is empty."""

    def update(self, p: Tensor, lr: float) -> None:
        if p.numel():
            super().update(p, lr)


class GoesByGroup(optim.Optimizer):
    """A number of all parameters of a group, as in methods that find their own learning rate."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "distance": 1e-30})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            group["distance"] += 1e-30 * sum(float(p.grad.abs().sum()) for p in given)
            for p in given:
                p.sub_(group["lr"] * group["distance"] * p.grad)


class GlobalNorm(optim.Optimizer):
    """One step size, from the norms of all gradients and all values."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        evaluate(closure)
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        slope, size = (sum(each.square().sum() for each in them) for them in ([p.grad for p in given], given))
        for p in given:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * float((size / slope).sqrt()))


class ClipsAll(optim.Adam):
    """Clips by the norm of all gradients in its step."""

    def step(self, closure: Any = None) -> None:
        evaluate(closure)
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1000.0)
        super().step()


class ClipsEach(optim.Adam):
    """Clips each gradient by its own norm in its step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                torch.nn.utils.clip_grad_norm_([p], 1.0)
        super().step()


class Perturbs(optim.Optimizer):
    """Evaluates the loss where the gradient of all parameters leads to (SAM; Foret et al. 2021)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "it needs a closure"
        evaluate(closure)
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        before = [p.clone() for p in given]
        for p in given:
            p.add_(p.grad, alpha=float(0.05 / norm))
        evaluate(closure)
        for p, old in zip(given, before, strict=True):
            p.copy_(old).sub_(p.grad, alpha=self.param_groups[0]["lr"])


class CentersGroups(OneByOne):
    """Scales the second param group by what the gradients of the first are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, *rest = self.param_groups
        scale = sum(float(p.grad.abs().mean()) for p in first["params"] if p.grad is not None)
        for group in rest:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=scale * group["lr"])


class Langevin(OneByOne):
    """Adds noise to each element."""

    def update(self, p: Tensor, lr: float) -> None:
        p.sub_(lr * p.grad + torch.randn_like(p))


class Lookahead(optim.Optimizer):
    """Wraps another one, with which it shares its groups (Zhang et al. 2019)."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.slow = inner, {}
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.slow.setdefault(p, p.clone())
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.slow[p].lerp_(p, 0.5))
