"""What people add to a model: hooks, adapters, frozen parts, checkpointing, parametrizations, random layers."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from .compare import REUSED, SAMPLES, USES, WIDTH, Block, Blocks, Case, check, in_order, mean_square


def changed(change: Callable[[Blocks], Any], step: Callable[[Any, Tensor], Tensor] = in_order, **options: Any) -> Case:
    """Four blocks, to which ``change`` does something before training."""

    def make() -> nn.Module:
        net = Blocks(step)
        change(net)
        return net

    return Case(make, **options)


# Hooks


def hook_on_inputs(net: Blocks) -> None:
    net.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    net.blocks[2].register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    net.blocks[3].mlp.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))  # inside of a unit


def hook_on_outputs(net: Blocks) -> None:
    net.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5 + args[0])
    net.blocks[2].mlp.register_forward_hook(lambda module, args, output: output + args[0])
    net.blocks[1].register_forward_hook(lambda module, args, output: net.seen.append(tuple(output.shape)))


class Collector(Blocks):
    """Collects features by hooks and has a loss for each: the usual way of knowledge distillation."""

    def __init__(self) -> None:
        super().__init__(collected)
        self.features: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(self.keep(number))

    def keep(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.features[number] = output

        return hook


def collected(net: Any, x: Tensor) -> Tensor:
    net.features = {}
    loss = in_order(net, x)
    total = loss + sum(mean_square(feature) * 0.1 for feature in net.features.values())
    net.features = {}
    return total


def hook_on_backward(net: Blocks) -> None:
    def scale(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    net.blocks[1].register_full_backward_hook(scale)


def hook_on_backward_inside(net: Blocks) -> None:
    net.blocks[2].mlp.register_full_backward_hook(lambda m, grad_input, grad_output: (grad_input[0] * 0.5,))


def hook_on_weights(net: Blocks) -> None:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def hook_on_activation(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    h.register_hook(lambda gradient: gradient * 0.5)
    return mean_square(d(c(h)))


# Parts that do not train, or train otherwise


def freeze_first(net: Blocks) -> None:
    net.blocks[:2].requires_grad_(False)


def freeze_middle(net: Blocks) -> None:
    net.blocks[1:3].requires_grad_(False)


def freeze_last(net: Blocks) -> None:
    net.blocks[3].requires_grad_(False)


def freeze_biases(net: Blocks) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bias" not in name)


class LoRA(nn.Module):
    """A low-rank adapter by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapters(net: Blocks) -> None:
    net.requires_grad_(False)
    for block in net.blocks:
        block.mlp[0] = LoRA(block.mlp[0])


def weight_norm(net: Blocks) -> None:
    for block in net.blocks:
        parametrizations.weight_norm(block.mlp[0])


def spectral_norm(net: Blocks) -> None:
    for block in net.blocks:
        parametrizations.spectral_norm(block.mlp[0])


def orthogonal(net: Blocks) -> None:
    parametrizations.orthogonal(net.blocks[1].mlp[0], use_trivialization=False)


def old_weight_norm(net: Blocks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in net.blocks:
            torch.nn.utils.weight_norm(block.mlp[0])


def of_hooked_layers(hook: Callable[[nn.Module], Any]) -> Case:
    """Units are layers whose weights hooks make."""

    def change(net: Blocks) -> None:
        net.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in net.blocks)
        net.blocks[1].register_forward_pre_hook(lambda layer, args: (2 * args[0],))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for layer in net.blocks:
                hook(layer)
        net.blocks[2].register_forward_pre_hook(lambda layer, args: (args[0] - 1,))

    return changed(change)


def prune_twice(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.random_unstructured(layer, "weight", 3)
    prune.l1_unstructured(layer, "bias", 0.2)


def script(net: Blocks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.blocks[1] = torch.jit.script(net.blocks[1])


# Checkpointing


class Recomputed(Block):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant and not x.requires_grad:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def recompute_in_units(use_reentrant: bool) -> Case:
    return Case(lambda: Blocks(in_order, lambda: Recomputed(use_reentrant)))


def recompute_units(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return mean_square(x)


def recompute_units_reentrant(net: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return mean_square(x)


def recompute_glue(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = checkpoint(lambda t: F.gelu(b(t) * 2).tanh(), a(x), use_reentrant=False)
    return mean_square(d(c(h)))


# Gradients of another kind


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


def own_function(function: Any) -> Callable[[Any, Tensor], Tensor]:
    def step(net: Any, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = a(x)
        return mean_square(d(c(function.apply(b(h))))) + mean_square(function.apply(h))

    return step


class Quantized(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Round.apply(x))


def straight_through(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    return mean_square(d(c(h + (h.sign() - h).detach())))


CASES = {
    "hook on inputs": changed(hook_on_inputs),
    "hook on outputs": changed(hook_on_outputs),
    "hook on backward inside of a unit": changed(hook_on_backward_inside),
    "hooks that collect": Case(Collector, USES),
    "hooks on weights": changed(hook_on_weights),
    "frozen at first": changed(freeze_first),
    "frozen in the middle": changed(freeze_middle),
    "frozen at last": changed(freeze_last),
    "frozen biases": changed(freeze_biases),
    "adapters": changed(adapters),
    "weight_norm": changed(weight_norm),
    "spectral_norm": changed(spectral_norm),
    "orthogonal": changed(orthogonal),
    "old weight_norm": changed(old_weight_norm),
    "pruned units": of_hooked_layers(prune_twice),
    "old weight_norm of units": of_hooked_layers(torch.nn.utils.weight_norm),
    "old spectral_norm of units": of_hooked_layers(torch.nn.utils.spectral_norm),
    "TorchScript": changed(script, differs="it fuses kernels after some calls"),
    "checkpoint inside of units": recompute_in_units(False),
    "checkpoint inside of units, reentrant": recompute_in_units(True),
    "autograd.Function in units": Case(lambda: Blocks(in_order, Quantized)),
    "straight-through": Case(lambda: Blocks(straight_through), USES),
    "gradient reversal": Case(lambda: Blocks(own_function(Reverse)), USES),
    "rounding": Case(lambda: Blocks(own_function(Round)), USES),
    "checkpoint of units": Case(lambda: Blocks(recompute_units)),
    "checkpoint of units, reentrant": Case(lambda: Blocks(recompute_units_reentrant)),
    "checkpoint of glue": Case(lambda: Blocks(recompute_glue)),
    "hook on a unit's backward": changed(hook_on_backward),
    "hook on an activation": Case(lambda: Blocks(hook_on_activation)),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_an_addition_to_the_model_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(CASES[name], pp)


class HuggingFace(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(1, 16, (SAMPLES, 6), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 16, "max_position_embeddings": 8, "hidden_size": WIDTH, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **rates, num_hidden_layers=4, num_attention_heads=2))


def with_lora(model: Any, targets: list[str], **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return HuggingFace(get_peft_model(model, LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, **options)))


def recomputing(model: Any, use_reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.train()
    return HuggingFace(model)


MODELS = {
    "LoRA on GPT-2": Case(lambda: with_lora(gpt2(), ["c_attn"], fan_in_fan_out=True)),
    "LoRA on BERT": Case(lambda: with_lora(bert(), ["query", "value"], modules_to_save=["cls"])),
    "gradient checkpointing": Case(lambda: recomputing(gpt2(), use_reentrant=False), REUSED),
    "gradient checkpointing, reentrant": Case(lambda: recomputing(gpt2(), use_reentrant=True), REUSED),
}


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # of transformers, within itself and peft
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_an_adapted_hugging_face_model_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(MODELS[name], pp)


class Skipping(Block):
    """Stochastic depth by Python's and PyTorch's numbers, inside of a unit; dropout."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3:
            return x
        keep = (torch.rand(len(x), 1) > 0.2).float()
        return x + F.dropout(self.mlp(self.norm(x)), 0.2, self.training) * keep


def stochastic_depth(net: Any, x: Tensor) -> Tensor:
    """The same in the glue."""
    for block in net.blocks:
        if random.random() < 0.3:
            continue
        if torch.rand(()) < 0.9:
            x = F.dropout(block(x), 0.1) + torch.randn(WIDTH)
    return mean_square(x + net.blocks[3](x))


RANDOM = {
    "in units": Case(lambda: Blocks(in_order, Skipping), draws=True),
    "in the glue": Case(lambda: Blocks(stochastic_depth), draws=True, differs=REUSED),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", RANDOM)
def test_random_depth_and_dropout_do_not_depend_on_the_number_of_stages(name: str, pp: int) -> None:
    check(RANDOM[name], pp)
