"""Whole networks of every family, as people write them, have the numbers of one process on any number of stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compare import GLUE, SAMPLES, USES, Case, check, mean_square
from .layers import VOCABULARY, WIDTH, Encoder, tokens_of


class OnImages(nn.Module):
    """Classifies images."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {
            "image": torch.rand(SAMPLES, 3, 8, 8, generator=generator),
            "label": torch.randint(5, (SAMPLES,), generator=generator),
        }


class Conv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(OnImages):
    """Skips are concatenated over all stages; sizes halve and double."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Conv(3, 4), Conv(4, 8), Conv(8, 8)])
        self.middle = Conv(8, 8)
        self.up = nn.ModuleList([Conv(16, 8), Conv(16, 4), Conv(8, 4)])
        self.out = nn.Conv2d(4, 3, 1)

    def loss(self, batch: Any) -> Tensor:
        x, skips = batch["image"], []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return F.mse_loss(self.out(x), batch["image"])


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.short = None
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        y += x if self.short is None else self.short(x)
        return F.relu(y, inplace=True)


class ResNet(OnImages):
    """As in torchvision: a stem, four layers of blocks, batch statistics, changes in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class ClassToken(OnImages):
    """A ViT by hand: parameters and buffers of the container, used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(Encoder() for _ in range(4))
        self.register_buffer("mask", torch.zeros(5, 5).masked_fill_(torch.eye(5).roll(1, 0) > 0, -1.0))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x[:, 0])


class Clip(nn.Module):
    """Two towers, a temperature in the glue, a contrastive loss over the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.vision = nn.ModuleList(Encoder() for _ in range(2))
        self.vision_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.text = nn.ModuleList(Encoder() for _ in range(2))
        self.text_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch: Any) -> Tensor:
        image = self.patch(batch["image"]).flatten(2).transpose(1, 2)
        for block in self.vision:
            image = block(image)
        image = F.normalize(self.vision_out(image.mean(1)), dim=-1)
        text = self.embed(batch["tokens"])
        for block in self.text:
            text = block(text)
        text = F.normalize(self.text_out(text[torch.arange(len(text)), batch["tokens"].argmax(-1)]), dim=-1)
        logits = self.logit_scale.exp() * image @ text.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"image": torch.rand(SAMPLES, 3, 8, 8, generator=generator), "tokens": tokens_of(generator)}


class Quantizer(nn.Module):
    """VQ-VAE: a codebook that follows an exponential average, in buffers; a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", self.codes.clone())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * self.scale
        codes = torch.cdist(x, self.codes).argmin(-1)
        chosen = F.embedding(codes, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(codes, 8).to(x.dtype)
                self.steps += 1
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
                self.codes = self.sums / self.counts.unsqueeze(-1)  # replaced, not changed
        return x + (chosen - x).detach(), F.mse_loss(x, chosen.detach()), codes


class VQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        hidden, commitment, codes = self.quantizer(self.encoder(batch["x"]))
        assert codes.dtype == torch.int64
        assert not codes.requires_grad
        return F.mse_loss(self.out(self.decoder(hidden)), batch["x"]) + 0.25 * commitment

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"x": torch.randn(SAMPLES, WIDTH, generator=generator)}


class Plain(nn.Sequential):
    """``nn.Sequential`` as the whole model."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Tanh(), nn.Linear(8, 5)),
        )

    loss = OnImages.loss
    batch = staticmethod(OnImages.batch)


class Pyramid(OnImages):
    """Returns a list of intermediate features, every one of which has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Conv(3, 4), Conv(4, 4), Conv(4, 4), Conv(4, 4)])
        self.heads = nn.ModuleList(nn.Linear(4, 5) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for block in self.blocks:
            x = block(x)
            features.append(x)
        return features

    def loss(self, batch: Any) -> Tensor:
        features = self(batch["image"])
        losses = [
            F.cross_entropy(head(feature.mean((2, 3))), batch["label"])
            for head, feature in zip(self.heads, features, strict=True)
        ]
        return torch.stack(losses).sum() + mean_square(features[-1])


class Tree(nn.Module):
    """A recursive structure: every node holds two smaller trees."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.children_ = nn.ModuleList(Tree(depth - 1) for _ in range(2)) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.own(x))
        if self.children_ is None:
            return x
        left, right = self.children_
        return x + left(x) * right(-x)

    def loss(self, batch: Any) -> Tensor:
        return mean_square(self(batch["x"]))

    batch = staticmethod(VQ.batch)


CASES = {
    "u-net": Case(UNet),
    "resnet": Case(ResNet),
    "class token": Case(ClassToken, GLUE),
    "two towers": Case(Clip),
    "vector quantization": Case(VQ),
    "nn.Sequential": Case(Plain),
    "list of features": Case(Pyramid),
    "cumulative batch statistics": Case(lambda: Plain(momentum=None)),
    "tree": Case(lambda: Tree(3), USES),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_network_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(CASES[name], pp)
