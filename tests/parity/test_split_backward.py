"""Split backwards, and several chunks of units per stage: the weights of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .chunks import NEVER, chunked, stages_of_chunks
from .compare import REUSED, SAMPLES, Block, Case, check, mean_square
from .models import VOCABULARY

WIDTH = 8
LENGTH = 4


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Product.apply(x, self.weight)) + x


class Shared(nn.Module):
    """Uses one layer twice, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.once = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(torch.tanh(self.twice(torch.tanh(self.twice(x))))) + x


class Normed(nn.Module):
    """Batch statistics, a parametrized weight, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.weighted = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.frozen(torch.relu_(self.weighted(self.norm(x))))


class Convolved(nn.Module):
    """Uses its input once: it comes first, where the input is used elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Hooked(nn.Module):
    """Hooks that would show in the weights if they ran twice or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        self.last.bias.register_post_accumulate_grad_hook(halve)
        self.last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return x + self.last(h.tanh())


class Checkpointed(Block):
    """Recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(super().forward, x, use_reentrant=False))


class Awkward(nn.Module):
    """Blocks of every kind, some of the glue's own, and a skip connection from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))
        kinds = [Convolved, Block, Shared, Normed, Hooked, Checkpointed, WithFunction]
        self.blocks = nn.ModuleList(kind() for kind in (*kinds, Block, Shared, Hooked))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, batch: Any) -> Tensor:
        first = x = self.embed(batch["tokens"]) + self.offset.expand(LENGTH, WIDTH)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x + first).flatten(0, 1), batch["tokens"].flatten())

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"tokens": torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)}


class Gpt2(nn.Module):
    """A Hugging Face model with its own loss."""

    def __init__(self, *, tied: bool = True) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=9,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=tied,
        )
        self.model = GPT2LMHeadModel(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["tokens"], labels=batch["tokens"]).loss

    batch = staticmethod(Awkward.batch)


CASES: dict[str, Case] = {
    "awkward": Case(Awkward),
    "gpt2": Case(lambda: Gpt2(tied=False)),
    "gpt2, tied": Case(Gpt2, differs=REUSED),
}

# Chunks per stage and how they are dealt out.
CHUNKS = [(1, "loop"), (2, "loop"), (3, "loop"), (2, "v")]


@pytest.mark.parametrize("delay", [None, 0, 3, NEVER])
@pytest.mark.parametrize(("per_stage", "placement"), CHUNKS)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_chunks_and_split_backwards_change_no_number(name, pp, per_stage, placement, delay):
    layout = (stages_of_chunks(pp, per_stage, placement), delay)
    check(CASES[name], pp, (1, 4) if delay == 3 else (4,), chunked, layout)
