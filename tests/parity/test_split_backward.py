"""Split backwards, and several chunks of units per stage: the weights of one process."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch_runner import MicrobatchRunner
from smp_strategy.pipeline.schedule import Action
from smp_strategy.testing import run_ranks
from tests.product import Product

from .chunks import NEVER, chunked, laid_out, stages_of_chunks
from .compare import REUSED, SAMPLES, Block, Blocks, Case, check, in_order, mean_square
from .models import VOCABULARY

WIDTH = 8
LENGTH = 4


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


@pytest.mark.parametrize(("per_stage", "placement"), CHUNKS)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_chunks_and_split_backwards_change_no_number(name, pp, per_stage, placement):
    check(CASES[name], pp, (1, 4), chunked, (stages_of_chunks(pp, per_stage, placement), 3))


@pytest.mark.parametrize(("per_stage", "placement"), CHUNKS)
def test_whole_backwards_of_several_chunks_change_no_number(per_stage, placement):
    check(CASES["awkward"], 4, (4,), chunked, (stages_of_chunks(4, per_stage, placement), None))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("delay", [0, 1, NEVER])
def test_weights_may_come_at_any_time_and_some_with_the_inputs(delay, every):
    check(CASES["awkward"], 2, (4,), chunked, (stages_of_chunks(2, 2, "v"), delay, every))


@pytest.mark.parametrize(("pp", "policy"), [(2, "zb-h1"), (4, "zb-h2"), (2, "zb-v"), (4, "zb-v"), (2, "auto")])
def test_policies_of_the_engine_change_no_number(policy, pp):
    check(replace(CASES["awkward"], options={"pipeline": policy}), pp, (4,))


def two_paths(net: Any, x: Tensor) -> Tensor:
    """The trace has one of them, and microbatches leave the plan for the other."""
    a, b, c, d = net.blocks
    h = b(a(x))
    if x.sum() > 0:
        h = c(h * net.offset)
    return mean_square(d(h))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("delay", [0, NEVER])
def test_a_microbatch_that_leaves_the_plan_finds_all_weights_done_in_their_order(delay, pp):
    check(Case(lambda: Blocks(two_paths)), pp, (4, 8), chunked, (stages_of_chunks(pp, 1, "loop"), delay))


class Skipping(nn.Module):
    """Takes part in every other microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, batch: Any) -> Tensor | None:
        loss = in_order(self, batch["x"])
        return None if batch["x"][0, 0] > 0 else loss


def train_with_skips(delay: int | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Skipping()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(SMPConfig(pipeline_parallel_degree=dist.get_world_size(), microbatches=4))
    engine.attach(module, [optimizer])
    with laid_out([*range(dist.get_world_size())], delay):
        for step in range(4):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            x[:, 0] = 1.0 if step == 2 else torch.tensor([-1, -1, 1, 1, -1, -1, 1, 1])
            result = engine.train_step(module, {"x": x}, loss_of=lambda loss: loss)
            optimizer.zero_grad()
            if result.loss is not None:
                result.commit(torch.ones(()), reduce=True)
            optimizer.step()
    state = engine.saved.full_state_dict()
    engine.close()
    return state


def test_microbatches_and_batches_without_a_loss_add_nothing():
    (alone,) = run_ranks(train_with_skips, 1, None)
    assert not torch.equal(alone["blocks.0.mlp.0.weight"], Skipping().state_dict()["blocks.0.mlp.0.weight"])
    for delay in (0, NEVER):
        found = run_ranks(train_with_skips, 2, delay)[0]
        assert all(torch.equal(alone[name], found[name]) for name in alone)


def note_gradients() -> tuple[list[tuple[str, list[bool]]], list[bool], bool]:
    """What a stage does in its second step, and which weights have gradients before each action and in the end."""
    torch.manual_seed(0)
    module = Blocks(in_order)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(module)
    notes: list[tuple[str, list[bool]]] = []
    do = MicrobatchRunner.do

    def has_gradient() -> list[bool]:
        return [block.mlp[0].weight.grad is not None for block in module.blocks]

    def noting(turns: MicrobatchRunner, action: Action) -> None:
        notes.append((str(action), has_gradient()))
        do(turns, action)

    with laid_out([0, 1], NEVER), mock.patch.object(MicrobatchRunner, "do", noting):
        result = engine.train_step(module.loss, Blocks.batch(torch.Generator()), loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
        end = has_gradient()
        before = len(notes)
        outputs = engine.eval_step(module.loss, Blocks.batch(torch.Generator())).outputs
    only_forward = all(name.startswith("F") for name, _ in notes[before:])
    return notes[:before], end, only_forward and not any(output.requires_grad for output in outputs)


def test_weights_get_their_gradients_in_their_own_actions_and_evaluation_has_none():
    for stage, (notes, end, evaluates) in zip((1, 0), run_ranks(note_gradients, 2), strict=True):
        own = [2 * stage, 2 * stage + 1]
        kinds = [name[0] for name, _ in notes]
        assert kinds[-2:] == ["W", "W"]
        assert sorted(kinds) == ["F", "F", "I", "I", "W", "W"]
        *before, (_, after_one) = notes
        assert not any(any(found) for _, found in before)
        assert [number for number, has in enumerate(after_one) if has] == own
        assert [number for number, has in enumerate(end) if has] == own
        assert evaluates


def fail_late() -> None:
    torch.manual_seed(0)
    module = Blocks(in_order)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(module)

    def refuse(gradient: Tensor) -> None:
        raise ValueError("no such gradient")

    module.blocks[3].mlp[0].weight.register_hook(refuse)
    with laid_out([0, 1], NEVER):
        engine.train_step(module.loss, Blocks.batch(torch.Generator()), loss_of=lambda loss: loss)


def test_an_error_in_the_second_part_ends_the_step_on_all_ranks():
    with pytest.raises(RuntimeError, match="no such gradient"):
        run_ranks(fail_late, 2)
