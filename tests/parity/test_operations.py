"""Every kind of tensor operation in the glue, between units of different stages."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compare import GLUE, USES, WIDTH, Blocks, Case, check, mean_square, steps_of

# Shapes and views


def reshapes(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x).unflatten(-1, (2, 4)).permute(1, 0, 2).flatten(1).view(2, len(x), 4).transpose(0, 1).reshape(len(x), -1)
    h = b(h)[:, None].expand(-1, 3, -1).movedim(1, 0).unbind(0)[2]
    h = c(h).split([3, 5], dim=1)[1]
    h = F.pad(h, (3, 0)).roll(1, 0).flip(1)
    return mean_square(d(torch.atleast_2d(h.contiguous().T).mT))


def indexing(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    order = torch.arange(len(x)).flip(0)
    h = b(h[order, :])
    h = h[..., [7, 6, 5, 4, 3, 2, 1, 0]] + h[None, 0, ::2].repeat_interleave(2, dim=-1)
    h = c(h.gather(1, torch.arange(WIDTH).expand(len(x), -1).flip(1)))
    mask = torch.arange(WIDTH) % 2 == 0
    h = torch.where(mask, h, h.detach() * 0.5).masked_fill(~mask & (torch.arange(WIDTH) > 5), 0.25)
    return mean_square(d(h.take_along_dim(order[:, None] % WIDTH, dim=1) + h))


def scattering(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    index = torch.arange(len(x)) // 2
    sums = torch.zeros(len(x), WIDTH).index_add(0, index, h)
    sums = sums.scatter_add(1, torch.zeros(len(x), 1, dtype=torch.int64), h[:, :1])
    g = c(sums) * 1
    g.index_put_((torch.tensor([0]),), h[:1].detach(), accumulate=True)
    g = g.index_copy(0, torch.tensor([0]), h[-1:]).scatter(1, index[:, None], 0.5)
    return mean_square(d(g).scatter_reduce(0, index[:, None].expand(-1, WIDTH), h, "amax"))


def values_as_indices(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    best, where = h.topk(4, dim=-1)
    h = b(torch.cat([best, h.gather(1, where).flip(1)], dim=1))
    order = h.sum(-1).argsort(descending=True)
    h = c(h[order])
    ranked, back = h.sort(dim=0, stable=True)
    codes = torch.bucketize(h.detach(), torch.linspace(-1, 1, 5))
    return mean_square(d(ranked) + F.one_hot(codes.clamp(max=7), 8).sum(1)) + back.float().mean()


def cumulative(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x).cumsum(dim=0)).logcumsumexp(dim=1)
    h = c(h.cummax(dim=1).values + h.diff(dim=1, prepend=h[:, :1]))
    return mean_square(d(torch.tril(h[:, :1] * h) + h.softmax(-1).cumprod(-1)))


# Algebra


def products(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    kernel = torch.einsum("ni,mi->nm", h, h).tanh()
    h = c(torch.einsum("nm,mi->ni", kernel, h))
    h = d(torch.baddbmm(h[None], kernel[None], h[None])[0] + torch.cdist(h, h).softmax(1) @ h)
    return mean_square(h @ h.mT) + torch.linalg.vector_norm(h) + (h[:, :, None] * h[:, None]).diagonal(0, 1, 2).mean()


def attention(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    q, k, v = a(x), b(x), c(x)
    heads = [t.view(1, len(x), 2, 4).transpose(1, 2) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, is_causal=True)
    return mean_square(d(out.transpose(1, 2).reshape(len(x), WIDTH)))


def spectra(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    waves = torch.fft.rfft(a(x), dim=-1)
    assert waves.is_complex()
    waves = waves * torch.polar(torch.ones(5), torch.linspace(0, 1, 5))
    h = c(b(torch.fft.irfft(waves, n=WIDTH, dim=-1)))
    rotated = torch.view_as_real(torch.view_as_complex(h.view(len(x), 4, 2)) * torch.tensor(1j)).flatten(1)
    return mean_square(d(rotated)) + waves.abs().mean() + waves.conj().real.mean()


# Types


def dtypes(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x).double()
    assert h.dtype == torch.float64
    h = b((h + torch.ones(WIDTH, dtype=torch.float64)).to(x.dtype))
    h = c(h.to(torch.bfloat16).to(h.dtype)).to(x)
    return mean_square(d(h.half().float().type_as(x))) + h.to("cpu").long().float().mean()


def integers(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    label = h.argmax(dim=-1)
    right = (label == b(h).argmax(-1)).float().mean()
    h = c(h * right + (label % 3)[:, None])
    return F.cross_entropy(d(h), label) + (label > 2).sum() / 100


def scalars(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    scale = h.abs().max()
    assert scale.shape == ()
    shift = b(h).mean()
    h = c(h / scale + shift)
    total = sum([h.sum(), 1.0, shift]) * 1e-2
    return mean_square(d(h)) + torch.stack([scale, total, 2 - shift]).prod() ** 2


def empties(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    nothing = h[:0]
    assert nothing.numel() == 0
    h = b(torch.cat([h, nothing]))
    none = c(h[:0])
    return mean_square(d(torch.cat([none, h]))) + none.sum()


# New tensors from old ones


def like(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    h = h + torch.zeros_like(h) + torch.full_like(h, 0.5) + torch.ones_like(h, dtype=torch.float64).float()
    h = h + h.new_zeros(h.shape) + h.new_tensor([0.25]) + h.new_full((1,), 2.0) + torch.empty_like(h).fill_(0.125)
    h = torch.cat([h, h.new_ones(1, WIDTH)])[:-1].to(c.mlp[0].weight.dtype)
    same = torch.zeros(h.shape, dtype=h.dtype, device=h.device)
    return mean_square(d(c(h + same)))


def copies(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    kept = h.detach().clone()
    h = c(h.clone()) + copy.copy(kept) + copy.deepcopy(kept) + kept.clone(memory_format=torch.contiguous_format)
    return mean_square(d(h))


def meets_types(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    assert isinstance(h, Tensor)
    assert torch.is_tensor(h)
    assert isinstance(h.detach(), torch.Tensor)
    assert issubclass(type(h), Tensor)
    assert h.device == x.device
    assert h.type() == x.type()
    assert hash(h) is not None
    assert h is not None
    assert {h: 1}[h] == 1
    assert any(h is other for other in [x, h])
    return mean_square(d(c(h)))


def in_place(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x) * 1
    h += net.offset
    h *= 0.5
    h[:, 1:3] = 0.0
    h[0].add_(1.0)
    h = b(h) * 1
    h.masked_fill_(h > 1, 1.0).clamp_(-1).relu_()
    g = c(h) * 1
    g.sub_(h).div_(2).addcmul_(h, h)
    F.relu(g, inplace=True)
    return mean_square(d(g + h))


def out_arguments(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    with torch.no_grad():
        kept = torch.zeros_like(h)
        torch.mul(h, 2.0, out=kept)
    return mean_square(d(c(h + kept)))


def iteration(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    rows = [row * number for number, row in enumerate(h)]
    first, *_ = h
    h = c(torch.stack(rows) + first)
    return mean_square(d(torch.vstack(list(h)))) + sum(h[0]) + len(h)


def losses(net: Any, x: Tensor) -> Tensor:
    """The losses of ``torch.nn`` that are not means of squares."""
    a, b, c, d = net.blocks
    h, g = b(a(x)), d(c(x))
    target = torch.arange(len(x)) % WIDTH
    return (
        F.cross_entropy(h, target, label_smoothing=0.1)
        + F.kl_div(h.log_softmax(-1), g.softmax(-1), reduction="batchmean")
        + F.binary_cross_entropy_with_logits(g, (x > 0).float())
        + F.cosine_embedding_loss(h, g, torch.ones(len(x)))
        + F.triplet_margin_loss(h, g, x)
        + F.smooth_l1_loss(h, g.detach())
        + F.nll_loss(h.log_softmax(1), target)
        + F.multi_margin_loss(g, target)
    )


def checked_loss(net: Any, x: Tensor) -> Tensor:
    """It looks at the values of an argument."""
    a, b, c, d = net.blocks
    h = b(a(x))
    return F.gaussian_nll_loss(h, x, d(c(h)).exp())


def checked_distribution(net: Any, x: Tensor) -> Tensor:
    """So does this."""
    a, b, c, d = net.blocks
    h = b(a(x))
    return -torch.distributions.Normal(h, d(c(h)).exp()).log_prob(x).mean()


def distributions(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    posterior = torch.distributions.Normal(h, F.softplus(h) + 0.1, validate_args=False)
    prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()), validate_args=False)
    g = d(c(posterior.mean))
    chosen = torch.distributions.Categorical(logits=g, validate_args=False)
    return (
        torch.distributions.kl_divergence(posterior, prior).mean()
        - chosen.log_prob(torch.zeros(len(x), dtype=torch.int64)).mean()
        - chosen.entropy().mean()
    )


STEPS = steps_of(
    [
        *(reshapes, cumulative, attention, dtypes, integers, empties, copies, meets_types),
        *(out_arguments, values_as_indices),
    ]
) | {
    **steps_of([indexing, scattering, products, spectra, scalars, iteration, like, losses], differs=USES),
    **steps_of([distributions, checked_distribution, checked_loss], differs=USES),
    **steps_of([in_place], differs=GLUE),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_an_operation_between_units_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(STEPS[name], pp)


class Double(Blocks):
    def __init__(self) -> None:
        super().__init__(lambda net, x: mean_square(net.blocks[3](net.blocks[2](net.blocks[1](net.blocks[0](x))))))
        self.double()

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"x": torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("pp", [2, 4])
def test_double_precision_stays_double(pp: int) -> None:
    check(Case(Double), pp)


def sampled(net: Any, x: Tensor) -> Tensor:
    """Draws by PyTorch's samplers, in the glue, on other stages."""
    a, b, c, d = net.blocks
    h = a(x)
    h = b(h + torch.randn_like(h) + torch.rand_like(h) + torch.empty_like(h).uniform_())
    posterior = torch.distributions.Normal(h, F.softplus(h) + 0.1, validate_args=False)
    h = c(posterior.rsample())
    hot = F.gumbel_softmax(h, hard=True)
    picked = torch.multinomial(h.softmax(-1), 2)
    return mean_square(d(F.dropout(hot * h, 0.3))) + picked.float().mean() + torch.bernoulli(h.sigmoid()).mean()


@pytest.mark.parametrize("pp", [2, 4])
def test_samples_do_not_depend_on_the_number_of_stages(pp: int) -> None:
    check(Case(lambda: Blocks(sampled), draws=True, differs=USES), pp)


class InARow(nn.Module):
    """Units are as many as stages need."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def loss(self, batch: Any) -> Tensor:
        x = F.dropout(batch["x"], 0.3)
        y = self.net(x + torch.randn_like(x))
        return mean_square(F.dropout(y, 0.5)) + (y * torch.rand_like(y)).mean() + F.dropout(self.net(y), 0.5).mean()

    batch = staticmethod(Blocks.batch)


@pytest.mark.parametrize("pp", [2, 4])
def test_draws_above_the_units_do_not_depend_on_how_many_these_are(pp: int) -> None:
    check(Case(InARow, draws=True, differs=USES), pp)
