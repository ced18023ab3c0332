"""Models for tests of sharded units: each of another kind, with children that are units."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    def __init__(self, inputs: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.up, self.down = nn.Linear(inputs, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Every child is a unit; elements of a list, too."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    @property
    def units(self) -> dict[str, nn.Module]:
        blocks = {f"blocks.{number}": block for number, block in enumerate(self.blocks)}
        return {"first": self.first, **blocks, "head": self.head}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


class Skips(Model):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        for number in (2, 3):
            self.blocks[number] = Block(2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        one = self.blocks[0](x)
        two = self.blocks[1](one)
        three = self.blocks[2](torch.cat([two, one], -1))
        four = self.blocks[3](torch.cat([three, x], -1))
        return self.head(four).square().mean()


class UsedTwice(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in (0, 1, 2, 1, 3, 1):
            x = x + self.blocks[number](x)
        return self.head(x).square().mean()


@dataclasses.dataclass
class Parts:
    left: Tensor
    more: dict[str, Any]


class Several(Block):
    def forward(self, x: Tensor) -> Parts:
        left, right = self.up(x).chunk(2, -1)
        return Parts(left, {"right": (right, x), "sum": [self.down(torch.cat([left, right], -1))], "text": "."})


class View(Block):
    """Runs again in backward, and returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False).t()


class ManyResults(Model):
    """Results in containers, views of each other and of arguments, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.blocks[number] = Several()
        self.blocks[3] = View()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(3):
            parts = self.blocks[number](x)
            right, same = parts.more["right"]
            assert same is x
            (total,) = parts.more["sum"]
            total.add_(1.0)
            total.mul_(right)
            x = total + same
        x = self.blocks[3](x)
        x.mul_(2.0)
        return self.head(x.t()).square().mean()


class Checkpointed(Block):
    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(self.norm(x))
        x = checkpoint(self.norm, x, use_reentrant=self.is_reentrant)
        return checkpoint(super().forward, x, use_reentrant=self.is_reentrant)


class CheckpointsInside(Model):
    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.blocks[number] = Checkpointed()
            self.blocks[number].is_reentrant = number == 1


class CheckpointsOutside(Model):
    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for first in (0, 2):

            def both(x: Tensor, first: int = first) -> Tensor:
                return self.blocks[first + 1](self.blocks[first](x))

            x = x + (checkpoint(both, x, use_reentrant=self.is_reentrant) if torch.is_grad_enabled() else both(x))
        return self.head(x).square().mean()


class ReentrantOutside(CheckpointsOutside):
    is_reentrant = True


class Hiding(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.extra = self.down(self.up(x)).square().mean()
        return super().forward(x).detach()


class HiddenLoss(Model):
    """A block's only way to the loss is a result that it leaves in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Hiding()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[1].extra


class Frozen(Model):
    """Parameters that are not trained, used without gradients, tied inside a unit, used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)
        self.blocks[3].again = self.blocks[3].up
        self.blocks[3].unused = nn.Parameter(torch.ones(3))
        self.blocks[0].nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.blocks[0](x)
        return super().forward(x)


class Branching(Model):
    """Which blocks are used, how often and in which order, depends on the samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for turn in range(3):
            number = int(x.sum().abs() * 1000) % 5
            if number < 4:
                x = x + self.blocks[number](x)
            if turn == 1 and number % 2:
                x = x + self.blocks[0](x)
        return self.head(x).square().mean()


MODELS = [
    Model,
    Skips,
    UsedTwice,
    ManyResults,
    CheckpointsInside,
    CheckpointsOutside,
    ReentrantOutside,
    HiddenLoss,
    Frozen,
    Branching,
]


def made(kind: type[Model]) -> Model:
    torch.manual_seed(0)
    return kind()


def batch(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
