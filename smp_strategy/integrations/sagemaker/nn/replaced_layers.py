"""Hugging Face's models whose layers SageMaker's library replaces by its own: scripts find them here, too.

Under ``smp.tensor_parallelism`` and ``smp.model_creation(tensor_parallelism=True)`` that library puts a
``DistributedTransformer`` into a model of a family that it knows. Scripts rely on it in three ways, although here the
model keeps its layers, names and values:

1. They read ``model.transformer.seq_layers``, and ``attention`` and ``output`` of each layer. These names lead to the
   model's own layers (``name_layers``). They are plain attributes, so state dicts don't have them.
2. They look for ``FusedLayerNorm`` to except it from weight decay. So that is the class of the model's layer norms.
3. They replace ``PreTrainedModel.init_weights`` by nothing, because the library draws the values of its layers anyway.
   In these contexts it is there again (``own_initialisation``): it also ties weights.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from torch import nn

from smp_strategy.integrations.sagemaker.nn.attention_layers import FusedLayerNorm
from smp_strategy.tensor_parallel.plan.annotations import is_enabled

__all__ = ["name_layers", "own_initialisation"]


class LayerPlaces(NamedTuple):
    """Where a family has its layers: module below the base model, list of layers, and the parts of each."""

    stack: str
    layers: str
    attention: str
    output: str


_FAMILIES: Final = {
    "gpt2": LayerPlaces("", "h", "attn", "mlp"),
    "gptj": LayerPlaces("", "h", "attn", "mlp"),
    "gpt_neo": LayerPlaces("", "h", "attn", "mlp"),
    "gpt_neox": LayerPlaces("", "layers", "attention", "mlp"),
    "bert": LayerPlaces("encoder", "layer", "attention", "output"),
    "roberta": LayerPlaces("encoder", "layer", "attention", "output"),
}


def name_layers(root: nn.Module) -> None:
    """Give SageMaker's names to layers of the models in ``root`` that were created to be split."""
    for model in root.modules():
        names = _FAMILIES.get(getattr(getattr(model, "config", None), "model_type", None) or "")
        base = getattr(model, "base_model", None)
        if names is None or base is None or not is_enabled(model):
            continue
        stack = base.get_submodule(names.stack)
        layers = getattr(stack, names.layers)
        _name(stack, "seq_layers", layers)
        if names.stack == "":
            _name(model, "transformer", base)
        for layer in layers:
            _name(layer, "attention", getattr(layer, names.attention))
            _name(layer, "output", getattr(layer, names.output))
        for part in model.modules():
            if type(part) is nn.LayerNorm:
                part.__class__ = FusedLayerNorm


def _name(module: nn.Module, name: str, part: nn.Module) -> None:
    if module is not part and name not in module._modules:
        vars(module)[name] = part  # not `setattr`, which would register it as a second child


@contextmanager
def own_initialisation() -> Iterator[None]:
    """Context in which Hugging Face's models draw and tie their weights, also if a script has switched that off."""
    loaded = sys.modules.get("transformers.modeling_utils")
    kind: Any = None if loaded is None else loaded.PreTrainedModel
    if kind is None or kind.init_weights.__module__ == kind.__module__:
        yield
        return
    switched_off = kind.init_weights
    kind.init_weights = _init_weights
    try:
        yield
    finally:
        kind.init_weights = switched_off


def _init_weights(model: Any) -> None:
    """What ``PreTrainedModel.init_weights`` does."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.initialize_weights()
    model.tie_weights(recompute_mapping=False)
