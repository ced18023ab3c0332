"""Whole networks of every family, as people write them, have the numbers of one process on any number of stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compare import GLUE, LAYOUT, REUSED, SAMPLES, USES, Case, check, mean_square

VOCABULARY = 16
WIDTH = 8
LENGTH = 6


def tokens_of(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, length), generator=generator)


class OnTokens(nn.Module):
    """Predicts tokens from tokens."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"tokens": tokens_of(generator), "labels": tokens_of(generator)}


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


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


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


class Albert(OnTokens):
    """One block, used six times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Encoder()
        self.other = Encoder()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.other(self.block(x))
        return self.head(self.norm(x))


class EncoderDecoder(OnTokens):
    """Like T5: encoder, decoder and head have one embedding; the decoder looks at the encoder's last output."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder_embed = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder_embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Encoder() for _ in range(3))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in (self.encoder_embed, self.decoder_embed, self.lm_head):
            module.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 1
        memory = self.encoder_embed(tokens)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        target = self.decoder_embed(tokens.roll(1, dims=1))
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        for layer in self.decoder:
            target = layer(target, memory, tgt_mask=causal, tgt_is_causal=True)
        return self.lm_head(target * WIDTH**-0.5)


class WholeTransformer(OnTokens):
    """``nn.Transformer`` as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        return self.head(self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True))


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


class Recurrent(OnTokens):
    """LSTM and GRU layers; states go on as tuples; sequences may be packed in a unit."""

    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.packed = Packed() if packed else nn.LSTM(2 * WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (h, c) = self.first(self.embed(tokens))
        x, _ = self.second(x, (h.repeat(2, 1, 1), torch.cat([c, c.tanh()])))
        x, last = self.gru(x)
        if isinstance(self.packed, Packed):
            x = self.packed(x, torch.arange(len(tokens)) % 3 + 2)
        else:
            x, _ = self.packed(x)
        return self.head(x + last[0].unsqueeze(1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.size(1))[0]


class Experts(nn.Module):
    """Top-k routing inside of a unit, by the methods of the textbook."""

    def __init__(self, *, capacity: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.capacity = capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        chances = self.gate(flat).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        out = torch.zeros_like(flat)
        hot = F.one_hot(chosen, 4).sum(1)
        for number, expert in enumerate(self.experts):
            if self.capacity:
                best, rows = (chances[:, number] * hot[:, number]).topk(len(flat) // 4)
                out = out.index_add(0, rows, expert(flat[rows]) * best.unsqueeze(-1))
            else:
                rows, column = torch.where(chosen == number)
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, column, None])
        balance = (chances.mean(0) * hot.float().mean(0)).sum() * 4
        return x + out.view_as(x), balance


class MixtureOfExperts(OnTokens):
    """Every block returns a loss of its own."""

    def __init__(self, *, capacity: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Experts(capacity=capacity) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["tokens"])
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        return loss + 0.01 * torch.stack(balances).mean()


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
    "albert": Case(Albert, REUSED),
    "encoder-decoder with one embedding": Case(EncoderDecoder, USES),
    "nn.Transformer": Case(WholeTransformer),
    "class token": Case(ClassToken, GLUE),
    "recurrent": Case(Recurrent, LAYOUT),
    "mixture of experts with capacity": Case(lambda: MixtureOfExperts(capacity=True)),
    "two towers": Case(Clip),
    "vector quantization": Case(VQ),
    "nn.Sequential": Case(Plain),
    "list of features": Case(Pyramid),
    # Units that look at values:
    "mixture of experts": Case(lambda: MixtureOfExperts(capacity=False)),
    "packed sequences": Case(lambda: Recurrent(packed=True)),
    "cumulative batch statistics": Case(lambda: Plain(momentum=None)),
    "tree": Case(lambda: Tree(3), USES),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_network_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(CASES[name], pp)
