"""What parts of units leave outside of the results: collected by hooks, kept in attributes, read by the step."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

from .compare import REUSED, SAMPLES, WIDTH, Block, Blocks, Case, check, mean_square, one_process

COLLECTED: ContextVar[Any] = ContextVar("collected", default=None)


def in_order(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return mean_square(x)


# Context variables


def collect(key: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        found = COLLECTED.get()
        if found is not None and isinstance(found[key], list):
            found[key].append(output)
        elif found is not None:
            found[key][len(found[key])] = output

    return hook


def collecting(kind: type, again: bool = False) -> Case:
    """Features of all blocks are collected; ``again``: the blocks run once more without that."""

    def step(net: Any, x: Tensor) -> Tensor:
        token = COLLECTED.set({"features": kind(), "unused": []})
        try:
            loss = in_order(net, x)
            features = COLLECTED.get()["features"]
        finally:
            COLLECTED.reset(token)
        features = list(features.values()) if isinstance(features, dict) else features
        net.seen.append(len(features))
        if again:
            loss = loss + in_order(net, x)
        return loss + sum(mean_square(feature) * 0.1 for feature in features)

    def make() -> nn.Module:
        net = Blocks(step)
        for block in net.blocks:
            block.mlp.register_forward_hook(collect("features"))
        return net

    return Case(make, differs=REUSED if again else "")


# Attributes


class Gate(nn.Module):
    """Chooses an expert for each sample, and keeps a loss and a statistic of how it chooses."""

    aux_loss: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 2)
        self.entropy: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        chances = self.score(x).softmax(-1)
        self.aux_loss = (chances.mean(0) ** 2).sum()
        self.entropy = -(chances * chances.log()).sum(-1).mean().detach()
        return chances


class Experts(nn.Module):
    """A block with two experts, which get the samples that chose them: how many depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        chances = self.gate(h)
        choice = chances.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = (choice == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(h[rows]) * chances[rows, number, None])
        return x + out


class Summing(Block):
    """Adds a loss to its attribute, which the step sets to zero."""

    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aux = self.aux + mean_square(x)
        return x


class Listing(Block):
    """Appends losses to a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.losses.append(mean_square(x))
        return x


def with_experts(net: Any, x: Tensor) -> Tensor:
    loss = in_order(net, x)
    return loss + 0.1 * sum(block.gate.aux_loss for block in net.blocks)


def one_by_one(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(x)
    for block in net.blocks:
        x = block(x)
        loss = loss + 0.1 * block.gate.aux_loss
    return loss + mean_square(x)


def noting_entropy(net: Any, x: Tensor) -> Tensor:
    loss = in_order(net, x)
    net.seen.append(torch.stack([block.gate.entropy for block in net.blocks]).sum().item())
    return loss


def after_a_look_at_a_value(net: Any, x: Tensor) -> Tensor:
    loss = in_order(net, x)
    net.seen.append(loss.item())
    return loss + 0.1 * sum(block.gate.aux_loss for block in net.blocks) + net.blocks[0].gate.entropy


def looking_at_the_loss(net: Any, x: Tensor) -> Tensor:
    loss = in_order(net, x)
    if net.blocks[1].gate.aux_loss > 0.1:
        loss = loss + net.blocks[1].gate.aux_loss
    return loss


def summing(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        block.aux = 0.0
    loss = in_order(net, x) + mean_square(net.blocks[1](x))
    return loss + sum(block.aux for block in net.blocks)


def listing(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        block.losses.clear()
    loss = in_order(net, x)
    return loss + sum(sum(block.losses) for block in net.blocks)


def attentive() -> nn.Module:
    def step(net: Any, x: Tensor) -> Tensor:
        loss = in_order(net, x)
        for block in net.blocks:
            assert block.mlp.map.shape == x.shape
        return loss + sum(block.mlp.map.abs().mean() for block in net.blocks)

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        module.map = output

    net = Blocks(step)
    for block in net.blocks:
        block.mlp.register_forward_hook(keep)
    return net


def capturing(in_list: bool, looks: bool = False) -> Case:
    """Hooks inside of units put features into an attribute of the whole module."""

    def step(net: Any, x: Tensor) -> Tensor:
        net.features = [] if in_list else {}
        loss = in_order(net, x)
        if looks:
            net.seen.append(loss.item())
        found = net.features if in_list else list(net.features.values())
        return loss + sum(mean_square(feature) for feature in found) * 0.1

    def make() -> nn.Module:
        net = Blocks(step)
        for number in (1, 3):

            def keep(module: nn.Module, args: Any, output: Tensor, number: int = number) -> None:
                if in_list:
                    net.features.append(output)
                else:
                    net.features[number] = output

            net.blocks[number].mlp.register_forward_hook(keep)
        return net

    return Case(make)


def last_one() -> nn.Module:
    def step(net: Any, x: Tensor) -> Tensor:
        return in_order(net, x) + mean_square(net.feature)

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        net.feature = output

    net = Blocks(step)
    net.blocks[2].mlp.register_forward_hook(keep)
    return net


ATTRIBUTES = {
    "loss of a mixture of experts": Case(lambda: Blocks(with_experts, Experts)),
    "the same, in a loop": Case(lambda: Blocks(one_by_one, Experts)),
    "statistics without gradient": Case(lambda: Blocks(noting_entropy, Experts)),
    "after a look at a value": Case(lambda: Blocks(after_a_look_at_a_value, Experts)),
    "a look at the loss itself": Case(lambda: Blocks(looking_at_the_loss, Experts)),
    "a sum over calls": Case(lambda: Blocks(summing, Summing), differs=REUSED),
    "a list of the unit": Case(lambda: Blocks(listing, Listing)),
    "set by a hook inside": Case(attentive),
    "a hook inside sets an attribute above": Case(last_one),
    "a hook inside fills a list above": capturing(in_list=True),
    "a hook inside fills a dict above": capturing(in_list=False),
    "the same, after a look at a value": capturing(in_list=True, looks=True),
}


# Hugging Face


class Model(nn.Module):
    """A language model whose loss takes more than its logits."""

    def __init__(self, model: nn.Module, extra: Callable[[Any], Tensor], **options: Any) -> None:
        super().__init__()
        self.model = model
        self.extra = extra
        self.options = options
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        output = self.model(input_ids=batch["ids"], labels=batch["ids"], **self.options)
        return output.loss + self.extra(output)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"ids": torch.randint(0, 32, (SAMPLES, 6), generator=generator)}


SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 16},
    **{"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "attn_implementation": "eager"},
}


def entropy_of_attention(output: Any) -> Tensor:
    assert len(output.attentions) == 4
    return -sum((a * a.clamp(min=1e-6).log()).sum(-1).mean() * 0.1 for a in output.attentions)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, router_aux_loss_coef=0.5)
    return Model(transformers.MixtralForCausalLM(config), lambda output: output.aux_loss, output_router_logits=True)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES)
    return Model(transformers.LlamaForCausalLM(config), entropy_of_attention, output_attentions=True)


def gpt2() -> nn.Module:
    names = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    config = transformers.GPT2Config(
        **names, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config)
    return Model(model, entropy_of_attention, output_attentions=True, output_hidden_states=True)


CASES = {
    **ATTRIBUTES,
    **ATTRIBUTES,
    **ATTRIBUTES,
    "lists in a context variable": collecting(list),
    "dicts in a context variable": collecting(dict),
    "not in all calls": collecting(list, again=True),
    "router logits of Mixtral": Case(mixtral),
    "attention maps of Llama": Case(llama),
    "attention maps of GPT-2": Case(gpt2, differs=REUSED),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_what_parts_of_units_leave_outside_of_results_is_everywhere(name: str, pp: int) -> None:
    check(CASES[name], pp)


class Quiet(Gate):
    """Has a loss in training only."""

    def forward(self, x: Tensor) -> Tensor:
        chances = super().forward(x)
        if not self.training:
            self.aux_loss = None
        return chances


class QuietExperts(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Quiet()


LATER = {
    "always set": Case(lambda: Blocks(with_experts, Experts)),
    "set in training only": Case(lambda: Blocks(with_experts, QuietExperts)),
    "after a look at a value": Case(lambda: Blocks(after_a_look_at_a_value, Experts)),
}


def validated_first(case: Case, pp: int) -> list[float]:
    """Losses of a pipeline that met a validation step, which reads no attributes, before it trained."""
    torch.manual_seed(0)
    net = case.make()
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=4))
    engine.attach(net, [])
    batch = net.batch(torch.Generator().manual_seed(0))
    with torch.inference_mode():
        engine.eval_step(lambda part: in_order(net.eval(), part["x"]), batch)
    net.train()
    result = engine.train_step(net.loss, batch, loss_of=lambda loss: loss)
    engine.close()
    return [loss.item() for loss in result.outputs]


@pytest.mark.parametrize("name", LATER)
def test_attributes_are_found_although_the_first_step_does_not_read_them(name: str) -> None:
    expected = one_process(LATER[name], 4).losses[:4]
    assert run_ranks(validated_first, 2, LATER[name], 2) == [expected, expected]
