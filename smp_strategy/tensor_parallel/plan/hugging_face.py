"""Plans for Hugging Face models: which of their layers are split how.

There are two sources. Our own table maps class names to the names of their layers and their split kinds, the attribute
with the size of a head, and the attributes whose numbers are smaller on a part (``self.num_heads`` in a ``view`` must
be that of this rank's heads). And many models bring a plan of their own (``base_model_tp_plan`` in their configuration,
``_tp_plan``), which names layers to split by columns and by rows; the code in between follows the sizes of the tensors.
The table takes precedence: it knows fused projections, which the plans do not describe. A block stays whole if
parameters among the parts (a learned activation) are in neither source.

The library is not imported: classes are recognised by their names and their package. A class with a ``forward`` of its
own is another class, whatever it inherits from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, final

from torch import nn

from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind, linear_sizes

__all__ = ["family_blocks", "is_from_transformers", "vocabulary_blocks"]


@final
@dataclass(frozen=True)
class _Layer:
    """Split of one layer of a family."""

    style: str
    num_blocks: int = 1
    heads: int = 1
    """Number of heads whose features form a granule."""


@final
@dataclass(frozen=True)
class _Family:
    """Classes whose layers are split alike."""

    classes: str
    """Their names."""
    layers: Mapping[str, _Layer]
    """Layers by name in the module; missing ones are skipped."""
    head: str | None = None
    """Attribute with the number of features of a head, in attentions."""
    divided: tuple[str, ...] = ()
    """Attributes that are divided by the number of ranks."""
    weights_at: int = 1
    """Position of the attention weights in the result of an attention."""
    bond: str | None = None
    """Class of the ancestor in which all of these are split together, because they pass parts to each other."""


_COLUMN, _ROW, _INSIDE = _Layer("column"), _Layer("row"), _Layer("inside")
_QKV = {"q_proj": _COLUMN, "k_proj": _COLUMN, "v_proj": _COLUMN}
_FC = {"fc1": _COLUMN, "fc2": _ROW}
_GATED = {"gate_proj": _COLUMN, "up_proj": _COLUMN, "down_proj": _ROW}
_BERT_ATTENTION = {
    "self.query": _COLUMN,
    "self.key": _COLUMN,
    "self.value": _COLUMN,
    "output.dense": _ROW,
}

_FAMILIES = (
    _Family(
        "GPT2Attention",
        {"c_attn": _Layer("column", num_blocks=3), "q_attn": _COLUMN, "c_proj": _ROW},
        "head_dim",
        ("num_heads", "split_size"),
    ),
    _Family("GPT2MLP GPTNeoMLP", {"c_fc": _COLUMN, "c_proj": _ROW}),
    _Family("GPTNeoSelfAttention", {**_QKV, "out_proj": _ROW}, "head_dim", ("num_heads",)),
    # Queries, keys and values of a head are adjacent.
    _Family("GPTNeoXAttention", {"query_key_value": _Layer("column", heads=3), "dense": _ROW}, "head_size"),
    _Family("GPTNeoXMLP", {"dense_h_to_4h": _COLUMN, "dense_4h_to_h": _ROW}),
    _Family("GPTJAttention", {**_QKV, "out_proj": _ROW}, "head_dim", ("num_attention_heads",)),
    _Family("GPTJMLP", {"fc_in": _COLUMN, "fc_out": _ROW}),
    _Family("OPTAttention", {**_QKV, "out_proj": _ROW}, "head_dim", ("num_heads",)),
    _Family("OPTDecoderLayer", _FC),
    _Family(
        "BertAttention RobertaAttention XLMRobertaAttention ElectraAttention CamembertAttention",
        _BERT_ATTENTION,
        "self.attention_head_size",
        ("self.num_attention_heads", "self.all_head_size"),
    ),
    _Family(
        "BertLayer RobertaLayer XLMRobertaLayer ElectraLayer CamembertLayer",
        {"intermediate.dense": _COLUMN, "output.dense": _ROW},
    ),
    _Family("ViTAttention", {**_QKV, "o_proj": _ROW}, "head_dim"),
    _Family("ViTMLP", _FC),
    _Family(
        "T5Attention",
        {"q": _COLUMN, "k": _COLUMN, "v": _COLUMN, "o": _ROW, "relative_attention_bias": _Layer("embedding", heads=0)},
        "key_value_proj_dim",
        ("n_heads", "inner_dim"),
        weights_at=2,
        bond="T5Stack",
    ),
    _Family("T5DenseActDense", {"wi": _COLUMN, "wo": _ROW}),
    _Family("T5DenseGatedActDense", {"wi_0": _COLUMN, "wi_1": _COLUMN, "wo": _ROW}),
    _Family("LlamaAttention MistralAttention Qwen2Attention GemmaAttention", {**_QKV, "o_proj": _ROW}, "head_dim"),
    _Family("MixtralAttention", {**_QKV, "o_proj": _ROW}, "head_dim"),
    _Family("Qwen3Attention", {**_QKV, "q_norm": _INSIDE, "k_norm": _INSIDE, "o_proj": _ROW}, "head_dim"),
    _Family(
        "PhiAttention",
        {**_QKV, "q_layernorm": _INSIDE, "k_layernorm": _INSIDE, "dense": _ROW},
        "head_dim",
    ),
    _Family("LlamaMLP MistralMLP Qwen2MLP Qwen3MLP GemmaMLP", _GATED),
    _Family("PhiMLP", _FC),
    # Of this package, under SageMaker's names.
    _Family(
        "DistributedAttentionLayer",
        {"query": _COLUMN, "key": _COLUMN, "value": _COLUMN, "dense": _ROW},
        "head_size",
        ("num_heads",),
    ),
)
_OWN: Final = f"{__name__.partition('.')[0]}."
_BY_CLASS = {name: family for family in _FAMILIES for name in family.classes.split()}

# Vocabulary of the models' own plans.
_PLANNED = {
    "colwise": SplitKind("column"),
    "rowwise": SplitKind("row"),
    "colwise_gather_output": SplitKind("column", is_whole_outside=True),
    "rowwise_split_input": SplitKind("row", is_whole_outside=True),
    "replicated_with_grad_allreduce": SplitKind("inside"),
}
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")


def is_from_transformers(module: nn.Module) -> bool:
    """Whether the class of ``module`` is, or inherits from, one of Hugging Face."""
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(module).__mro__)


def family_blocks(modules: Mapping[str, nn.Module]) -> Iterator[LayerBlock]:
    """Blocks of known models in ``modules``, which maps all qualified names."""
    bonds = _bonds(modules)
    for name, module in modules.items():
        family = _BY_CLASS.get(_class_of_forward(module))
        if family is not None and (is_from_transformers(module) or type(module).__module__.startswith(_OWN)):
            yield _block(name, module, family, bonds.get(name))
    for name, module in modules.items():
        plan = {**_plan_of_base(module), **_plan_of_class(module)}
        if plan:
            yield from _planned_blocks(name, modules, plan)


def vocabulary_blocks(modules: Mapping[str, nn.Module]) -> Iterator[LayerBlock]:
    """Blocks of token embeddings and of layers that compute scores for tokens, in models in ``modules``."""
    seen: set[int] = set()
    for name, module in modules.items():
        if not is_from_transformers(module):
            continue
        tables = [_asked(module, "get_input_embeddings"), _asked(module, "get_output_embeddings")]
        if not isinstance(tables[0], nn.Embedding):
            continue  # What it reads are no tokens.
        for weight in [table.weight for table in tables if _is_table(table)]:
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            sharing = {n: m for n, m in modules.items() if _is_table(m) and m.weight is weight}
            layers = {
                n: SplitKind("vocab") if isinstance(m, nn.Embedding) else SplitKind("logits")
                for n, m in sharing.items()
            }
            yield LayerBlock(name, f"vocabulary of {type(module).__name__}", layers)


def _is_table(layer: Any) -> bool:
    if not isinstance(layer, nn.Module) or layer._parameters.get("weight") is None:
        return False
    return isinstance(layer, nn.Embedding) or linear_sizes(layer) is not None


def _asked(module: nn.Module, method: str) -> Any:
    """Embeddings that a model returns from ``method``; many have none, and say so in different ways."""
    ask = getattr(module, method, None)
    try:
        return ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        return None


def _class_of_forward(module: nn.Module) -> str:
    return next(kind.__name__ for kind in type(module).__mro__ if "forward" in vars(kind))


def _attribute(module: nn.Module, path: str) -> Any:
    *parents, last = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    return getattr(module, last)


def _block(name: str, module: nn.Module, family: _Family, bond: str | None) -> LayerBlock:
    head = 1 if family.head is None else int(_attribute(module, family.head))
    parts = dict(module.named_modules())
    layers: dict[str, SplitKind] = {}
    heads: dict[str, int] = {}
    for relative, layer in family.layers.items():
        if relative not in parts:
            continue
        num_blocks = layer.num_blocks
        if getattr(module, "is_cross_attention", False) and relative == "c_attn":
            num_blocks = 2
        granule = head * layer.heads if layer.style in ("column", "row") else 1
        layers[_joined(name, relative)] = SplitKind(layer.style, num_blocks, granule)  # type: ignore[arg-type]
        sizes = linear_sizes(parts[relative])
        if family.head is not None and sizes is not None:
            length = sizes[1 if layer.style == "column" else 0]
            heads.setdefault(_name_of_heads(relative), length // (num_blocks * granule))
    divided = tuple(_place(name, path) for path in family.divided)
    attention = None
    if family.head is not None:
        attention = _place(name, family.head)[0], family.weights_at
    block = LayerBlock(name, type(module).__name__, layers, heads, divided, attention, bond=bond)
    learned = [part for part in parts if "act" in part.rpartition(".")[2] and _owns_parameters(parts[part])]
    return block if not learned else block.refused(f"`{learned[0]}` has parameters, which would see parts")


def _name_of_heads(layer: str) -> str:
    return "key/value heads" if layer in ("k_proj", "v_proj") else "heads"


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _place(name: str, path: str) -> tuple[str, str]:
    owner, _, attribute = path.rpartition(".")
    return _joined(name, owner), attribute


def _joined(name: str, relative: str) -> str:
    return ".".join(part for part in (name, relative) if part)


def _bonds(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """For each bonded module, the name of the ancestor that defines the bond."""
    found = {}
    for name, module in modules.items():
        family = _BY_CLASS.get(type(module).__name__)
        if family is None or family.bond is None:
            continue
        around = [n for n, m in modules.items() if type(m).__name__ == family.bond and f"{name}.".startswith(f"{n}.")]
        if around:
            found[name] = max(around, key=len)
    return found


def _plan_of_base(module: nn.Module) -> dict[str, str]:
    """Plan in the configuration of a model, which is for the model without a head."""
    if not is_from_transformers(module) or getattr(module, "base_model", None) is not module:
        return {}
    plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def _plan_of_class(module: nn.Module) -> dict[str, str]:
    """Plan of a model's class, which is for its head. The attribute of the object covers all of it."""
    plan = getattr(type(module), "_tp_plan", None) if is_from_transformers(module) else None
    return dict(plan) if isinstance(plan, Mapping) else {}


def _planned_blocks(root: str, modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> Iterator[LayerBlock]:
    """Blocks of the layers that ``plan`` names, by their parent module."""
    by_parent: dict[str, dict[str, str]] = {}
    for name in modules:
        if root and not name.startswith(f"{root}."):
            continue
        relative = name.removeprefix(f"{root}.") if root else name
        style = next((style for pattern, style in plan.items() if fnmatchcase(relative, pattern)), None)
        if style is not None:
            by_parent.setdefault(name.rpartition(".")[0], {})[name] = style
    for parent, styles in by_parent.items():
        yield _planned_block(parent, styles, modules)


def _planned_block(parent: str, styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> LayerBlock:
    source = "the model's plan"
    unknown = sorted({style for style in styles.values() if style not in _PLANNED})
    if unknown:
        layers = {name: SplitKind("column") for name in styles}
        return LayerBlock(
            parent, source, layers, problem=f"the model's plan calls it `{unknown[0]}`, which is not built"
        )
    hows = {name: _PLANNED[style] for name, style in styles.items()}
    if all(how.is_whole_outside for how in hows.values()):
        return LayerBlock(parent, source, hows)
    module = modules[parent]
    head = next((size for name in _HEAD_SIZES if isinstance(size := getattr(module, name, None), int)), None)
    if head is None and "attention" in type(module).__name__.lower():
        return LayerBlock(parent, source, hows, problem=f"the size of a head of {type(module).__name__} is not known")
    odd = [name for name, part in module.named_modules(prefix=parent) if name not in hows and _owns_parameters(part)]
    if odd:
        return LayerBlock(
            parent, source, hows, problem=f"the model's plan says nothing of the parameters of `{odd[0]}`"
        )
    heads: dict[str, int] = {}
    for name, how in hows.items():
        sizes = linear_sizes(modules[name])
        if sizes is not None and head is not None:
            length = sizes[1 if how.style == "column" else 0]
            heads.setdefault(_name_of_heads(name.rpartition(".")[2]), length // head)
            hows[name] = replace(how, granule=head)
    return LayerBlock(parent, source, hows, heads, attention=None if head is None else (parent, 1))
