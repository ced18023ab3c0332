"""Write text with a trained model: the plainest loop there is, for any module that maps tokens to logits."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["sample"]


@torch.no_grad()
def sample(
    model: Callable[[Tensor], Tensor],
    *,
    prompt: bytes,
    length: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """``prompt`` and ``length`` more bytes; bytes that are no UTF-8 are shown as replacement characters."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1]
        chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
