"""Losses that the caller computes from outputs, against one process that does the same with the same microbatches."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

MICROBATCHES = 4
STEPS = 3
Forward = Callable[[Any], Tensor]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 24, "n_positions": 8}
    # Untied, so that all sums have one order.
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def tokens(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randint(24, (8, 8), generator=generator)


def once(forward: Forward, batch: Tensor, between: Callable[[], None]) -> None:
    """Cross entropy over the whole batch: no mean over microbatches."""
    logits = forward(batch)
    between()
    (0.7 * F.cross_entropy(logits.flatten(0, 1), batch.flatten(), label_smoothing=0.1)).backward()


def contrasted(forward: Forward, batch: Tensor, between: Callable[[], None]) -> None:
    """Two calls, and a loss that compares each sample with all others."""
    left, right = forward(batch), forward(batch.flip(1))
    between()
    (left.mean(1) @ right.mean(1).T).logsumexp(1).sum().backward()


def twice(forward: Forward, batch: Tensor, between: Callable[[], None]) -> None:
    """Two losses from one call."""
    logits = forward(batch)
    logits.pow(2).mean().backward(retain_graph=True)
    between()
    F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()


class Outside:
    """``forward`` of the engine as a function with history; what a front door does."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self.engine = engine
        self.model = model

    def __call__(self, batch: Tensor) -> Tensor:
        step = self.engine.forward_step(lambda ids: self.model(input_ids=ids).logits, batch)
        return Joined.apply(torch.zeros((), requires_grad=True), step)


class Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, step: Any) -> Tensor:
        ctx.step = step
        return torch.cat(step.outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.step.backward([[part] for part in gradient.split(ctx.step.sizes)], retain_graph=keep)
        return None, None


def plain(model: nn.Module, batch: Tensor, microbatches: int) -> tuple[Tensor, Callable[[Tensor, bool], None]]:
    outputs = [model(input_ids=ids).logits for ids in split(batch, microbatches)[0]]

    def backward(gradient: Tensor, keep: bool) -> None:
        parts = gradient.split([len(output) for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            torch.autograd.backward(output, part, retain_graph=keep)

    return torch.cat([output.detach() for output in outputs]), backward


class Plainly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, model: nn.Module, batch: Tensor, microbatches: int) -> Tensor:
        with torch.enable_grad():
            logits, ctx.rest = plain(model, batch, microbatches)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.rest(gradient, torch._C._autograd._get_current_graph_task_keep_graph())
        return None, None, None, None


def in_one_process(loop: Callable[..., None], replicas: int, microbatches: int) -> dict[str, Tensor]:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def forward(batch: Tensor) -> Tensor:
        return Plainly.apply(torch.zeros((), requires_grad=True), model, batch, microbatches)

    for step in range(STEPS):
        found = []
        for replica in range(replicas):
            model.zero_grad()
            loop(forward, tokens(step, replica), lambda: None)
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = sum(gradients[1:], gradients[0]) / replicas
        optimizer.step()
    return model.state_dict()


def on_ranks(loop: Callable[..., None], options: dict[str, Any], evaluates: bool) -> dict[str, Tensor]:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(SMPConfig(**{"microbatches": MICROBATCHES, **options}))
    engine.attach(model, [optimizer])
    forward = Outside(engine, model)

    def between() -> None:
        if evaluates:
            with torch.no_grad():
                engine.eval_step(lambda ids: model(input_ids=ids).logits, tokens(9, 9))

    for step in range(STEPS):
        loop(forward, tokens(step, engine.mesh.dp_rank), between)
        engine.reduce_gradients()
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        optimizer.zero_grad()
    state = engine.saved.full_state_dict()
    engine.close()
    return state


LAYOUTS = {
    "pp1": (1, {"pipeline_parallel_degree": 1}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "pp4": (4, {"pipeline_parallel_degree": 4}),
    "pp2_dp2": (4, {"pipeline_parallel_degree": 2}),
    "sdp2": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "microbatches": 1}),
    "pp2_sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "zero1": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
    "tp2": (2, {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}),
    "recomputed": (2, {"pipeline_parallel_degree": 2, "activation_checkpointing": "all"}),
    "offloaded": (2, {"pipeline_parallel_degree": 2, "offload_activations": True}),
}


@pytest.mark.parametrize("loop", [once, contrasted, twice], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_one_process(layout, loop):
    world, options = LAYOUTS[layout]
    replicas = world // (options["pipeline_parallel_degree"] * options.get("tensor_parallel_degree", 1))
    expected = in_one_process(loop, replicas, options.get("microbatches", MICROBATCHES))
    found, *_ = run_ranks(on_ranks, world, loop, options, layout != "pp1")
    # A shard group adds up the gradients of each backward before they are added to the last one's.
    is_exact = layout != "tp2" and ("sdp" not in layout or loop is once)
    for name, value in expected.items():
        if not is_exact:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(found[name], value), name


class Untied(nn.Module):
    """Nothing is shared between stages: all sums have one order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Three kinds of outputs: per sample, inside of a container, a number."""
        for layer in self.layers:
            x = layer(x) + x
        return x, {"half": x[:, :3] * 2}, x.pow(2).mean()


def gradients(pp: int, drops: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Untied()
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=MICROBATCHES))
    engine.attach(model)
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    for number in range(3):
        step = engine.forward_step(model, x + number)
        if drops and number == 1:
            del step
            gc.collect()
            continue
        weights = [size / 10 for size in step.sizes]
        step.backward(
            [
                [torch.ones_like(h), torch.full_like(output["half"], 0.3), torch.tensor(weight)]
                for (h, output, _), weight in zip(step.outputs, weights, strict=True)
            ]
        )
        assert step.is_over
        with pytest.raises(RuntimeError, match="second time"):
            step.backward([])
    engine.reduce_gradients()
    return [torch.zeros(()) if each.grad is None else each.grad for each in model.parameters()]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("pp", [2, 4])
def test_gradients_do_not_depend_on_the_number_of_stages(pp, drops):
    [expected] = run_ranks(gradients, 1, 1, drops)
    by_rank = run_ranks(gradients, pp, pp, drops)
    for number, value in enumerate(expected):
        [found] = [each[number] for each in by_rank if each[number].ndim]
        assert torch.equal(found, value)
