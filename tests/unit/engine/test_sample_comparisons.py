"""Losses that compare the samples of a batch are found in the dry run, and no others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.dry_run import DryRunInput, dry_run
from smp_strategy.engine.given_partition import choose_placed_units
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.pipeline.batch_loss import sample_watch
from smp_strategy.pipeline.microbatch import split

SAMPLES, LENGTH, WIDTH, CLASSES = 8, 4, 6, 5


class Net(nn.Module):
    """Blocks that keep samples apart, and what glue may use."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale, self.proxies = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(SAMPLES // 2, WIDTH))
        self.register_buffer("queue", torch.randn(WIDTH, 16))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.blocks(x)


def batch_of():
    return {
        "x": torch.randn(SAMPLES, WIDTH),
        "y": torch.randn(SAMPLES, WIDTH),
        "texts": torch.randn(SAMPLES, LENGTH, WIDTH),
        "ids": torch.randint(0, CLASSES, (SAMPLES, LENGTH)),
        "mask": torch.rand(SAMPLES, LENGTH) > 0.3,
        "labels": torch.arange(SAMPLES) % 3,
    }


def comparison(loss, batch=None, num=2):
    net = Net()
    config = SMPConfig(pipeline_parallel_degree=2, microbatches=num)
    units = choose_placed_units(config, net, 2)
    calls, device = UnitCalls(None), torch.device("cpu")
    microbatches, sizes = split(batch or batch_of(), num)
    inputs = DryRunInput(
        module=net,
        units=units,
        calls=calls,
        shape_inference=ShapeInference(device),
        device=device,
        batch=(microbatches, sizes),
    )
    calls.intercept(units, net)
    try:
        found = dry_run(lambda microbatch: loss(net, microbatch), microbatches[0], lambda loss: loss, inputs)
    finally:
        calls.give_back()
    assert found.trace is not None
    assert found.trace.loss is not None
    return found.comparison


# Losses that compare samples


def clip(net, batch):
    x, y = (F.normalize(net(batch[name]), dim=-1) for name in "xy")
    logits, labels = net.scale.exp() * x @ y.t(), torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip_of_transformers(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    x, y = (each / each.norm(p=2, dim=-1, keepdim=True) for each in (x, y))
    logits = torch.matmul(x, y.t().to(x.device)) * net.scale.exp()
    return F.cross_entropy(logits.T, torch.arange(len(logits)))


def siglip(net, batch):
    logits = net(batch["x"]) @ net(batch["y"]).t() * net.scale
    signs = 2 * torch.eye(len(logits)) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


def simclr(net, batch):
    z = F.normalize(torch.cat([net(batch["x"]), net(batch["y"])]), dim=1)
    similar = z @ z.T / 0.5
    similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    n = len(batch["x"])
    return F.cross_entropy(similar, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def simclr_by_cosine(net, batch):
    z = torch.cat([net(batch["x"]), net(batch["y"])])
    similar = F.cosine_similarity(z[:, None, :], z[None, :, :], dim=-1)
    own = torch.eye(len(z), dtype=torch.bool)
    positive = own.roll(shifts=len(z) // 2, dims=0)
    nll = -similar[positive] + torch.logsumexp(similar.masked_fill(own, -9e15), dim=-1)
    return nll.mean()


def simclr_by_parts(net, batch):
    z = F.normalize(torch.cat([net(batch["x"]), net(batch["y"])]), dim=1)
    similar = torch.exp(torch.mm(z, z.t()) / 0.5)
    mask = (torch.ones_like(similar) - torch.eye(len(z))).bool()
    similar = similar.masked_select(mask).view(len(z), -1)
    return -torch.log(similar.mean(-1)).mean()


def with_detached_keys(net, batch):
    q, k = net(batch["x"]), net(batch["y"]).detach()
    return F.cross_entropy(torch.einsum("nc,mc->nm", q, k), torch.arange(len(q)))


def negatives_from_the_batch(net, batch):
    return F.cross_entropy(net(batch["x"]) @ batch["y"].T, torch.arange(len(batch["x"])))


def barlow_twins(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    c = (x.T @ y) / len(x)
    on = torch.diagonal(c).add_(-1).pow_(2).sum()
    return on + 0.005 * (c - torch.eye(WIDTH)).pow(2).sum()


def vicreg(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    return F.mse_loss(x, y) + torch.relu(1 - torch.sqrt(x.var(dim=0) + 1e-4)).mean()


def prototypes(net, batch):
    z = net(batch["x"])
    n = len(z) // 2
    classes = F.one_hot(batch["labels"][:n], CLASSES).float()
    centers = classes.T @ z[:n] / (classes.sum(0)[:, None] + 1e-6)
    return F.cross_entropy(-torch.cdist(z[n:], centers), batch["labels"][n:])


def prototypes_of_blocks(net, batch):
    z = net(batch["x"])
    n = len(z) // 2
    centers = z[:n].view(2, n // 2, -1).mean(1)
    return F.cross_entropy(-((z[n:, None] - centers[None]) ** 2).sum(-1), batch["labels"][n:] % 2)


def triplets(net, batch):
    z = net(batch["x"])
    distances = torch.cdist(z, z)
    same = batch["labels"][:, None] == batch["labels"][None]
    hardest = (distances * same).max(1).values
    nearest = distances.masked_fill(same, 1e9).min(1).values
    return F.relu(hardest - nearest + 1).mean()


def supervised_contrast(net, batch):
    z = F.normalize(net(batch["x"]), dim=-1)
    similar = torch.div(torch.matmul(z, z.T), 0.1)
    similar = similar - similar.max(dim=1, keepdim=True).values.detach()
    same = torch.eq(batch["labels"][:, None], batch["labels"][None]).float()
    log = similar - torch.log(torch.exp(similar).sum(1, keepdim=True))
    return -((same * log).sum(1) / same.sum(1)).mean()


def dice_of_the_batch(net, batch):
    p, y = net(batch["texts"]).sigmoid(), (batch["texts"] > 0).float()
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def root_of_a_mean(net, batch):
    return torch.sqrt(F.mse_loss(net(batch["x"]), batch["y"]))


def normalized_by_the_batch(net, batch):
    z = net(batch["x"])
    return ((z - z.mean(0)) / z.std(0)).relu().mean()


def with_its_neighbour(net, batch):
    z = net(batch["x"])
    return F.relu(1 - (z - z.roll(1, 0)).square().sum(-1)).mean()


def shifted_negatives(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    return F.triplet_margin_loss(x, y, torch.roll(y, 1, dims=0))


def shuffled_negatives(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    return F.triplet_margin_loss(x, y, y[torch.tensor([*range(1, len(x)), 0])])


def triplets_by_label(net, batch):
    z, labels = net(batch["x"]), batch["labels"]
    first, second = torch.where(labels[:, None] != labels[None])
    return F.relu(1 - (z[first] - z[second]).norm(dim=-1)).mean()


def ranked_pairs(net, batch):
    scores = net.head(net(batch["x"]))[:, 0]
    first, second = torch.triu_indices(len(scores), len(scores), 1)
    return F.margin_ranking_loss(scores[first], scores[second], torch.ones(len(first)))


def smooth_over_samples(net, batch):
    z = net(batch["x"])
    return (z[1:] - z[:-1]).square().mean()


def one_half_with_the_other(net, batch):
    first, second = net(batch["x"]).chunk(2)
    return F.cosine_similarity(first, second).mean()


def joint_and_marginal(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    return torch.cat([x, y.flip(0)], dim=1).prod(1).mean()


def around_class_means(net, batch):
    z = net(batch["x"])
    means = torch.zeros(CLASSES, WIDTH).index_add(0, batch["labels"], z)
    means = means / batch["labels"].bincount(minlength=CLASSES).clamp(min=1)[:, None]
    return (z - means[batch["labels"]]).square().mean()


def differences_of_neighbours(net, batch):
    return torch.diff(net(batch["x"]), dim=0).square().mean()


def nuclear_norm(net, batch):
    return torch.linalg.svdvals(net(batch["x"])).sum()


def scores_of(net, batch):
    return net.head(net(batch["x"]))[:, 0]


def outer_product(net, batch):
    return torch.outer(scores_of(net, batch), scores_of(net, batch)).tanh().mean()


def contraction(net, batch):
    z = net(batch["x"])
    return torch.tensordot(z, z, dims=([1], [1])).square().mean()


def independence(net, batch):
    """HSIC."""
    x, y, n = net(batch["x"]), net(batch["y"]), len(batch["x"])
    centered = torch.eye(n) - 1 / n
    return torch.trace(x @ x.T @ centered @ y @ y.T @ centered) / (n - 1) ** 2


def alignment(net, batch):
    """Linear CKA."""
    x, y = (z - z.mean(0) for z in (net(batch["x"]), net(batch["y"])))
    return 1 - (x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())


def windows_of_samples(net, batch):
    return net(batch["x"]).unfold(0, 2, 1).prod(-1).mean()


def shifted_by_a_join(net, batch):
    z = net(batch["x"])
    return F.mse_loss(z, torch.cat([z[1:], z[:1]]))


def shuffled_at_random(net, batch):
    z = net(batch["x"])
    return F.mse_loss(z, z[torch.randperm(len(z))])


def flipped(net, batch):
    z = net(batch["x"])
    return F.l1_loss(z, z.flip(0))


def loop_over_pairs(net, batch):
    z = net(batch["x"])
    pairs = [(z[i] - z[j]).square().sum() for i in range(len(z)) for j in range(i)]
    return torch.stack(pairs).mean()


def loop_over_rows(net, batch):
    rows, total = list(net(batch["x"])), 0.0
    for number, row in enumerate(rows):
        for other in rows[:number]:
            total = total + torch.dot(row, other)
    return total / len(rows) ** 2


def written_row_by_row(net, batch):
    z, similar = net(batch["x"]), torch.zeros(len(batch["x"]), len(batch["x"]))
    for number in range(len(z)):
        similar[number] = z @ z[number]
    return similar.exp().mean()


def all_distances(net, batch):
    return F.pdist(net(batch["x"])).mean()


def ranks(net, batch):
    scores = scores_of(net, batch)
    return F.softplus(scores[:, None] - scores[None]).triu(1).mean()


def area_under_the_curve(net, batch):
    scores, positive = scores_of(net, batch), torch.arange(len(batch["x"])) % 2 == 0
    return F.relu(1 - (scores[positive][:, None] - scores[~positive][None])).mean()


def sorted_scores(net, batch):
    scores = scores_of(net, batch).sort().values
    return (scores * torch.arange(len(scores))).mean()


def hardest_samples(net, batch):
    losses = F.binary_cross_entropy_with_logits(scores_of(net, batch), batch["labels"] / 2, reduction="none")
    return losses.topk(2).values.mean()


def survival(net, batch):
    """Partial likelihood of Cox."""
    scores = scores_of(net, batch)[torch.argsort(batch["y"][:, 0])]
    return (torch.log(scores.exp().cumsum(0)) - scores).mean()


def covariance(net, batch):
    z = net(batch["x"])
    z = z - z.mean(0)
    return (z.T @ z / (len(z) - 1)).pow(2).sum()


def discrepancy(net, batch):
    x, y = net(batch["x"]), batch["y"]
    return torch.exp(-torch.cdist(x, x)).mean() - 2 * torch.exp(-torch.cdist(x, y)).mean()


def correlation_with_labels(net, batch):
    return torch.corrcoef(torch.stack([scores_of(net, batch), batch["y"][:, 0]]))[0, 1]


def attention_over_samples(net, batch):
    z = net(batch["x"])[None]
    return F.scaled_dot_product_attention(z, z, z).square().mean()


def softmax_over_groups(net, batch):
    return (scores_of(net, batch).view(-1, 2).softmax(1) * batch["y"][:, 0].view(-1, 2)).mean()


def centered_between_blocks(net, batch):
    z = net.blocks[0](batch["x"])
    return net.blocks[1](z - z.mean(0)).square().mean()


def centered_in_place(net, batch):
    z = net(batch["x"]).clone()
    z -= z.mean(0)
    return z.pow_(4).mean()


def advantages_of_the_model(net, batch):
    values = scores_of(net, batch).detach()
    return ((values - values.mean()) / values.std() * scores_of(net, batch)).mean()


def advantages_of_the_batch(net, batch):
    rewards = batch["y"][:, 0]
    return ((rewards - rewards.mean()) / rewards.std() * scores_of(net, batch)).mean()


def centered_targets(net, batch):
    return F.mse_loss(net(batch["x"]), batch["y"] - batch["y"].mean(0))


COMPARING = [
    *(outer_product, contraction, independence, alignment, windows_of_samples, shifted_by_a_join),
    *(shuffled_at_random, flipped, loop_over_pairs, loop_over_rows, written_row_by_row, all_distances, ranks),
    *(area_under_the_curve, sorted_scores, hardest_samples, survival, covariance, discrepancy),
    *(correlation_with_labels, attention_over_samples, softmax_over_groups, centered_between_blocks),
    *(centered_in_place, advantages_of_the_model, advantages_of_the_batch, centered_targets),
    *(clip, clip_of_transformers, siglip, simclr, simclr_by_cosine, simclr_by_parts, with_detached_keys),
    *(negatives_from_the_batch, barlow_twins, vicreg, prototypes, prototypes_of_blocks, triplets),
    *(supervised_contrast, dice_of_the_batch, root_of_a_mean, normalized_by_the_batch),
    *(with_its_neighbour, shifted_negatives, shuffled_negatives, triplets_by_label, ranked_pairs),
    *(differences_of_neighbours, nuclear_norm),
    *(smooth_over_samples, one_half_with_the_other, joint_and_marginal, around_class_means),
]


@pytest.mark.parametrize("loss", COMPARING, ids=lambda loss: loss.__name__)
def test_losses_that_compare_samples_are_found(loss):
    assert __file__ in comparison(loss)


FEW = [clip, barlow_twins, flipped, ranks, survival, covariance]


@pytest.mark.parametrize("loss", FEW, ids=lambda loss: loss.__name__)
def test_microbatches_of_one_sample_are_no_excuse(loss):
    assert comparison(loss, num=SAMPLES)


def far_above(net, batch):
    """Units that give features have arguments that are too large to be followed."""
    hidden = net.norm(net(batch["texts"].repeat(1, 8, 1))) * 2
    features = F.normalize(net.head(hidden[:, 0]), dim=-1)
    return F.cross_entropy(features @ features.t(), torch.arange(len(features)))


def far_above_but_alone(net, batch):
    hidden = net.norm(net(batch["texts"].repeat(1, 8, 1))) * 2
    return F.cross_entropy(net.head(hidden[:, 0]), batch["labels"])


def test_samples_are_followed_through_tensors_that_are_too_large_for_values(monkeypatch):
    monkeypatch.setattr(sample_watch, "_MOST_ELEMENTS", 100)
    assert "`matmul`" in comparison(far_above)
    assert comparison(far_above_but_alone) == ""


# Losses that do not


def classification(net, batch):
    return F.cross_entropy(net.head(net(batch["x"])), batch["labels"])


def language_model(net, batch):
    h = net.tokens(batch["ids"]) + net.places(torch.arange(LENGTH))[None]
    h = net.norm(net(h))
    logits = net.head(h)[:, :-1].reshape(-1, CLASSES)
    return F.cross_entropy(logits, batch["ids"][:, 1:].reshape(-1))


def attention_in_glue(net, batch):
    h = net(net.tokens(batch["ids"]))
    q, k, v = (each.view(len(h), LENGTH, 2, WIDTH // 2).transpose(1, 2) for each in (h, h * 2, h + 1))
    scores = q @ k.transpose(-2, -1) / 3**0.5
    scores = scores.masked_fill(~batch["mask"][:, None, None, :], -1e9).softmax(-1)
    h = (scores @ v).transpose(1, 2).reshape(len(h), LENGTH, WIDTH)
    h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return net.norm(h).square().mean()


def sequence_first(net, batch):
    h = net(batch["texts"].transpose(0, 1))
    scores = torch.einsum("tbd,sbd->bts", h, h).softmax(-1)
    return torch.bmm(scores, h.permute(1, 0, 2)).mean()


def masked_mean(net, batch):
    losses = (net(batch["texts"]) - 1).square().mean(-1)
    return (losses * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def pooled(net, batch):
    h, mask = net(batch["texts"]), batch["mask"].float()
    h = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9)
    return F.binary_cross_entropy_with_logits(net.head(h)[:, 0], (batch["labels"] > 2).float())


def selected(net, batch):
    h = net(batch["texts"])
    return F.mse_loss(h[batch["mask"]], torch.zeros_like(h)[batch["mask"]]) + h.amax(1).mean()


def dice_of_each_sample(net, batch):
    p, y = net(batch["texts"]).sigmoid().flatten(1), (batch["texts"] > 0).float().flatten(1)
    return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1))).mean()


def mean_of_features(net, batch):
    return F.mse_loss(net(batch["texts"]).mean(1), batch["y"]) + net(batch["x"]).std(1).mean()


def pairs_of_one_sample(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    return F.triplet_margin_loss(x, y, net(batch["x"] + 1)) + (1 - F.cosine_similarity(x, y)).mean()


def negatives_from_a_queue(net, batch):
    q, k = F.normalize(net(batch["x"]), dim=1), F.normalize(net(batch["y"]), dim=1).detach()
    own = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
    logits = torch.cat([own, torch.einsum("nc,ck->nk", [q, net.queue])], dim=1)
    return F.cross_entropy(logits / 0.1, torch.zeros(len(q), dtype=torch.long))


def learned_proxies(net, batch):
    """As many proxies as samples in a microbatch."""
    logits = F.normalize(net(batch["x"])) @ F.normalize(net.proxies).T
    return F.cross_entropy(logits, batch["labels"] % len(net.proxies))


def weighted_terms(net, batch):
    first, second = net(batch["x"]).square().mean(), net(batch["y"]).abs().mean()
    penalty = sum(each.square().sum() for each in net.parameters())
    return torch.exp(-net.scale) * first + net.scale + 0.5 * second / 3 + 1e-4 * penalty


def gan(net, batch):
    real, fake = net.head(net(batch["x"])), net.head(net(batch["y"]).detach())
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def variational(net, batch):
    mu, log_var = net.head(net(batch["x"]))[:, :4].chunk(2, dim=1)
    z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
    return z.square().mean() - 0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp()) / len(mu)


def statistics_that_are_logged(net, batch):
    z = net(batch["x"])
    net.seen = (z @ z.T).softmax(-1), z.std(0).mean(), z.mean().exp()
    return z.square().mean()


def balance_of_experts(net, batch):
    probabilities = net.head(net(batch["texts"])).softmax(-1)
    chosen = F.one_hot(probabilities.argmax(-1), CLASSES).float()
    return (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum() + probabilities.square().mean()


def images(net, batch):
    maps = net(batch["texts"]).transpose(1, 2).view(-1, WIDTH, 2, 2)
    maps = F.interpolate(F.max_pool2d(F.pad(maps, (1, 1, 1, 1)), 2), scale_factor=2)
    return (
        F.cross_entropy(maps, torch.zeros(len(maps), 4, 4, dtype=torch.long))
        + F.batch_norm(maps, None, None, training=True).mean()
    )


def views_side_by_side(net, batch):
    first, second = net(torch.cat([batch["x"], batch["y"]])).chunk(2)
    third, fourth = torch.cat([net(batch["x"]), net(batch["y"])]).split(len(batch["x"]))
    return F.cosine_similarity(first, second).mean() + F.mse_loss(third, fourth)


def masks_made_twice(net, batch):
    h, g, labels = net(batch["texts"]), net(batch["texts"] * 2), batch["labels"]
    rows = F.mse_loss(net(batch["x"])[labels > 0], net(batch["y"])[labels > 0]) if (labels > 0).any() else 0
    return F.mse_loss(h[batch["mask"]], g[batch["mask"].clone()]) + rows


def first_and_last_tokens(net, batch):
    h, ends = net(batch["texts"]), batch["mask"].sum(1) - 1
    spans = h[torch.arange(len(h)), ends] * h[torch.arange(len(h)), 0]
    flat = h.flatten(0, 1)
    return (spans + flat[::LENGTH] * flat[LENGTH - 1 :: LENGTH]).mean() + (h[:, 1:] - h[:, :-1]).square().mean()


def sample_by_sample(net, batch):
    h, total = net(batch["texts"]), 0.0
    for number in range(len(h)):
        total = total + F.mse_loss(h[number], batch["texts"][number]) * (h[number, 0] - h[number, 1]).square().mean()
    return total / len(h)


def critic(net, batch):
    x, y = net(batch["x"]), net(batch["y"])
    return net(x + y).mean() - net(x + 1).roll(1, 0).mean()


def rolled_in_time(net, batch):
    h = net(batch["texts"])
    return (
        (h - h.roll(1, 1)).square().mean()
        + h.diff(dim=1).abs().mean()
        + (h * h.flip((1, 2))).mean()
        + (h - torch.roll(h, -1, dims=-1)).abs().mean()
    )


def weights_of_the_batch(net, batch):
    losses, weights = net(batch["x"]).square().mean(-1), batch["y"][:, 0].abs()
    return (losses * weights).sum() / weights.sum()


def denoising(net, batch):
    z, times = net(batch["x"]), torch.rand(len(batch["x"]), 1)
    noise = torch.randn_like(z)
    return F.mse_loss(net(F.dropout(z, 0.5) * times + noise * (1 - times)), noise)


def pairs_of_views(net, batch):
    """Views that are joined before the model sees them: side by side, and one after the other."""
    first, second = net(torch.cat([batch["x"], batch["y"]])).chunk(2)
    twice = net(batch["texts"].repeat_interleave(2, 0)).view(-1, 2, LENGTH, WIDTH)
    return (first * second).sum(-1).exp().mean() + (twice[:, 0] * twice[:, 1]).tanh().mean()


def tokens_of_one_sample(net, batch):
    h = net(batch["texts"].flatten(0, 1)).view(-1, LENGTH, WIDTH)
    return (h @ h.transpose(1, 2)).softmax(-1).square().mean() + h.cumsum(1).exp().mean() + h.sort(1).values[:, 0].sum()


def alignments_in_time(net, batch):
    logs, n = net(batch["texts"]).log_softmax(-1).transpose(0, 1), len(batch["texts"])
    lengths = torch.full((n,), LENGTH), torch.full((n,), 2)
    return F.ctc_loss(logs, torch.ones(n, 2, dtype=torch.long), *lengths)


def mixed_images(net, batch):
    """An augmentation of the inputs is no comparison of their results."""
    x = 0.3 * batch["x"] + 0.7 * batch["x"].flip(0)
    return F.cross_entropy(net.head(net((x - x.mean()) / x.std())), batch["labels"], label_smoothing=0.1)


def own_pairs_of_a_matrix(net, batch):
    """Of all pairs, those of a sample with itself count."""
    x, y = net(batch["x"]), net(batch["y"])
    return (x @ y.T).diagonal().exp().mean() + torch.trace(y @ x.T) / len(x)


def half_precision(net, batch):
    with torch.autocast("cpu", torch.bfloat16):
        logits = net.head(net(batch["x"])) @ net.head.weight
    return (F.cross_entropy(logits.bfloat16(), batch["labels"]) + logits.float().square().mean()).bfloat16()


APART = [
    *(weights_of_the_batch, denoising, pairs_of_views, tokens_of_one_sample, alignments_in_time, mixed_images),
    *(own_pairs_of_a_matrix, half_precision),
    *(classification, language_model, attention_in_glue, sequence_first, masked_mean, pooled, selected),
    *(dice_of_each_sample, mean_of_features, pairs_of_one_sample, negatives_from_a_queue, learned_proxies),
    *(weighted_terms, gan, variational, statistics_that_are_logged, balance_of_experts, images),
    *(views_side_by_side, masks_made_twice, first_and_last_tokens, sample_by_sample, critic, rolled_in_time),
]


@pytest.mark.parametrize("loss", APART, ids=lambda loss: loss.__name__)
def test_ordinary_losses_are_not_mentioned(loss):
    assert comparison(loss) == ""


@pytest.mark.parametrize("loss", [language_model, attention_in_glue, masked_mean], ids=lambda loss: loss.__name__)
def test_ordinary_losses_of_one_sample_are_not_mentioned(loss):
    assert comparison(loss, num=SAMPLES) == ""
