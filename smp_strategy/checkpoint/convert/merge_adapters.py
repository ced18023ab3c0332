"""Merges LoRA adapters of PEFT into the weights that they adapt, one tensor at a time when it is written.

``W + scaling * B A`` is computed by the same operations as by PEFT's ``merge_and_unload``, so the result is that, bit
for bit. The adapters are in the checkpoint of a PEFT model, beside the weights, or in a folder of PEFT, which has their
configuration in any case::

    checkpoint   base_model.model.h.0.attn.base_layer.weight    folder    base_model.model.h.0.attn.lora_A.weight
                 base_model.model.h.0.attn.lora_A.default.weight          base_model.model.h.0.attn.lora_B.weight
    merged       h.0.attn.weight

Weights that are trained as a whole (``modules_to_save``) replace the original ones.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.convert.safetensors import open_safetensors
from smp_strategy.config.sizes import show_count
from smp_strategy.errors import CheckpointError

__all__ = ["AdapterConfig", "merge_adapters"]

CONFIG: Final = "adapter_config.json"
FILE: Final = "adapter_model.safetensors"
# Options with which weights are merged in another way.
_OTHER_WAYS: Final = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
    *("velora_config", "megatron_config"),
)
_ROOT: Final = "base_model.model."
_LORA: Final = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.(?!weight$)(?P<adapter>[^.]+))?(\.weight)?"
)
_SAVED: Final = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL: Final = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")


@final
@dataclass(frozen=True)
class AdapterConfig:
    """The part of PEFT's configuration of adapters that merging needs."""

    r: int
    lora_alpha: float
    use_rslora: bool
    fan_in_fan_out: bool
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Read ``adapter_config.json``.

        Raises:
            CheckpointError: there is none, or the adapters are of another kind.
        """
        try:
            given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            kind, ways = given["peft_type"], [name for name in _OTHER_WAYS if given.get(name)]
            found = cls(
                given["r"],
                given["lora_alpha"],
                bool(given.get("use_rslora")),
                bool(given.get("fan_in_fan_out")),
                given.get("alpha_pattern") or {},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder} has no configuration of LoRA adapters ({CONFIG}): {error}") from error
        if kind != "LORA" or ways:
            raise CheckpointError(
                f"The adapters of {folder} are not merged here: {' and '.join(ways) or kind} needs another way than "
                "plain LoRA. Load the model with PEFT, and call `merge_and_unload()`."
            )
        return found

    def scaling(self, module: str, rank: int) -> float:
        """Factor of the product for ``module``, whose matrices have ``rank``."""
        keys = [key for key in self.alpha_pattern if re.match(rf"(.*\.)?({key})$", module)]
        alpha = self.alpha_pattern[keys[0]] if keys else self.lora_alpha
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


@final
@dataclass
class _Pair:
    """Matrices of an adapted module."""

    is_embedding: bool
    sides: dict[str, LazyTensor]


def merge_adapters(contents: CheckpointContents, folder: Path) -> list[str]:
    """Merge adapters into the weights of ``contents``, in place; returns remarks.

    Args:
        contents: Weights of a PEFT model with its adapters, or of the model without.
        folder: Folder with the configuration of the adapters and, if the weights are without, with the adapters.

    Raises:
        CheckpointError: the adapters are of another kind, or do not fit the weights.
    """
    config = AdapterConfig.read(folder)
    weights, pairs, saved = _sorted(contents.weights)
    if not pairs:
        stored, pairs, others = _sorted(open_safetensors(folder / FILE).weights)
        saved = {**saved, **others, **stored}
    if not pairs:
        raise CheckpointError(f"Neither the checkpoint nor {folder / FILE} has adapters.")
    start = _start(weights, pairs)
    for name, value in saved.items():
        weights[_place(weights, f"{start}{name}", "")] = value
    names_of: dict[object, list[str]] = {}
    for name, value in weights.items():
        if isinstance(value, LazyTensor) and value.memory is not None:
            names_of.setdefault(value.memory, []).append(name)
    for module, pair in pairs.items():
        name = _place(weights, f"{start}{module}.weight", " that an adapter is for")
        base = weights[name]
        if len(tied := names_of.get(base.memory, [name])) > 1:
            raise CheckpointError(
                f"`{name}` has an adapter and is tied to `{next(each for each in tied if each != name)}`, so it cannot "
                "be merged into one of them. Load the model with PEFT, and call `merge_and_unload()`."
            )
        weights[name] = _merged(name, base, pair, config, module)
    contents.weights = weights
    contents.optimizers = []
    return [f"Adapters of {show_count(len(pairs), 'module')} were merged."]


def _sorted(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, _Pair], dict[str, Any]]:
    """Weights by the names of the model without PEFT, adapters by module, and weights that were trained as a whole."""
    weights: dict[str, Any] = {}
    pairs: dict[str, _Pair] = {}
    saved: dict[str, Any] = {}
    adapters: set[str] = set()
    for full, value in given.items():
        name = full.replace(_ROOT, "", 1).replace(".base_layer.", ".")
        if match := _LORA.fullmatch(name):
            pair = pairs.setdefault(match["module"], _Pair(bool(match["kind"]), {}))
            pair.sides[match["side"]] = value
            adapters.add(match["adapter"] or "")
        elif match := _SAVED.fullmatch(name):
            saved[f"{match['module']}.{match['rest']}"] = value
            adapters.add(match["adapter"])
        elif match := _ORIGINAL.fullmatch(name):
            weights[f"{match['module']}.{match['rest']}"] = value
        else:
            weights[name] = value
    if len(adapters) > 1:
        raise CheckpointError(
            f"There are several adapters, {', '.join(sorted(adapters))}, and which of them are to be merged cannot be "
            "told. Save the one that you want: `model.save_pretrained(folder, selected_adapters=[...])`."
        )
    return weights, pairs, saved


def _start(weights: Mapping[str, Any], pairs: Mapping[str, _Pair]) -> str:
    """Prefix of the names of weights, before those of the adapters: the attribute of a LightningModule."""
    module = next(iter(pairs))
    starts = [name.removesuffix(f"{module}.weight") for name in weights if name.endswith(f"{module}.weight")]
    fitting = [start for start in starts if all(f"{start}{each}.weight" in weights for each in pairs)]
    if len(fitting) != 1:
        found = (
            f"{len(fitting)} sets of weights fit" if fitting else f"there is no `{module}.weight` in it, for example"
        )
        raise CheckpointError(f"The adapters do not fit the checkpoint: {found}. Give that of the model they adapt.")
    return fitting[0]


def _place(weights: Mapping[str, Any], name: str, which: str) -> str:
    if name not in weights:
        raise CheckpointError(f"The checkpoint has no weight `{name}`{which}.")
    return name


def _merged(name: str, base: Any, pair: _Pair, config: AdapterConfig, module: str) -> LazyTensor:
    sides = [pair.sides.get(side) for side in "AB"]
    if any(not isinstance(each, LazyTensor) or len(each.shape) != 2 for each in (base, *sides)):
        raise CheckpointError(
            f"The adapter of `{name}` is not a pair of matrices, and is not merged here. Load the model with PEFT, and "
            "call `merge_and_unload()`."
        )
    a, b = pair.sides["A"], pair.sides["B"]
    rank, shape = a.shape[0], (b.shape[0], a.shape[1])
    if b.shape[1] != rank or base.shape not in (shape, shape[::-1]):
        raise CheckpointError(f"`{name}` has the shape {list(base.shape)}, but its adapter is for {list(shape)}.")
    is_transposed = pair.is_embedding or base.shape != shape or (shape[0] == shape[1] and config.fan_in_fan_out)
    scaling = config.scaling(module, rank)
    return LazyTensor(base.shape, base.dtype, partial(_sum, base, a, b, scaling, is_transposed=is_transposed))


def _sum(base: LazyTensor, a: LazyTensor, b: LazyTensor, scaling: float, *, is_transposed: bool) -> Tensor:
    """The merged weight. Half precision is multiplied in float32, as PEFT does on CPUs."""
    left, right = b.read(), a.read()
    dtype, is_half = left.dtype, left.dtype in (torch.float16, torch.bfloat16)
    product = left.float() @ right.float() if is_half else left @ right
    delta = (product.T if is_transposed else product) * scaling
    return base.read().clone().add_(delta.to(dtype))
