"""Networks that read sequences have the numbers of one process on any number of stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compare import REUSED, USES, Case, check
from .layers import VOCABULARY, WIDTH, Encoder, tokens_of


class OnTokens(nn.Module):
    """Predicts tokens from tokens."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"tokens": tokens_of(generator), "labels": tokens_of(generator)}


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


CASES = {
    "albert": Case(Albert, REUSED),
    "encoder-decoder with one embedding": Case(EncoderDecoder, USES),
    "nn.Transformer": Case(WholeTransformer),
    "recurrent": Case(Recurrent),
    "mixture of experts with capacity": Case(lambda: MixtureOfExperts(capacity=True)),
    "mixture of experts": Case(lambda: MixtureOfExperts(capacity=False)),
    "packed sequences": Case(lambda: Recurrent(packed=True)),
}


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_network_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(CASES[name], pp)
