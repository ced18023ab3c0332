"""``smp.nn.huggingface``: translations between names of Hugging Face and SageMaker's layers, and hooks for the latter.

SageMaker's library puts layers of its own into Hugging Face's models, with other names and shapes. Here a model keeps
its layers, so its state dict has Hugging Face's names already, and the translations return what they get. Files that
SageMaker's library has written are read by ``smp import``. For the same reason the hooks, which scripts pass to
``smp.tp_register_with_module`` together with one of SageMaker's layers, are never called.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from smp_strategy.errors import CheckpointError, UnsupportedError

__all__ = ["FAMILIES", "bert", "family", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit"]

FAMILIES: Final = ("gpt2", "bert", "roberta", "gptj", "gptneo", "gptneox", "t5", "vit")
# Layers that a family has hooks for.
_HOOKS: Final = {
    **{"gpt2": ("transformer_layer", "transformer_lm_head"), "gptneo": ("transformer_lm_head",)},
    **{"t5": ("transformer_layer",), **dict.fromkeys(("bert", "roberta", "gptj"), ("transformer",))},
}
# Of GPT-2's blocks alone: today's names, and those of version 1.8.
_OF_BLOCKS: Final = (
    *("translate_hf_state_dict_to_smdistributed_gpt2_layer", "translate_state_dict_to_hf_gpt2_layer"),
    *("translate_hf_block_state_dict_to_smdistributed", "translate_layer_state_dict_to_hf_gpt2_block"),
)
# Part of all names of SageMaker's layers.
_THEIRS: Final = ("transformer.seq_layers.", "word_embedding.")


def _same(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Return ``state_dict``, whose names are those of the model.

    Raises:
        CheckpointError: they are names of SageMaker's layers.
    """
    del max_seq_len
    if found := next((name for name in state_dict if any(part in name for part in _THEIRS)), None):
        raise CheckpointError(
            f"`{found}` is a name of SageMaker's layers. Read what its library has written with `smp import`."
        )
    return dict(state_dict)


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "A hook for SageMaker's layer in the place of Hugging Face's is called, but a model keeps its layers here. "
        "Pass the hooks to `smp.tp_register_with_module` with a layer of `smp.nn`."
    )


def _hooks() -> tuple[Any, Any, Any]:
    """Return an init, a forward and a return hook for ``smp.tp_register_with_module``."""
    return _refused, _refused, _refused


def family(name: str) -> ModuleType:
    """Make the module of a family of models, with its translations and hooks."""
    module = ModuleType(f"{__name__}.{name}", f"Translations for {name}, which change nothing.")
    names = (f"translate_state_dict_to_hf_{name}", f"translate_hf_state_dict_to_smdistributed_{name}")
    # Until version 1.9.
    older = (f"translate_hf_{name}_state_dict_to_smdistributed", "translate_hf_state_dict_to_smdistributed")
    for call in (*names, *older, *(_OF_BLOCKS if name == "gpt2" else ())):
        setattr(module, call, _same)
    for layer in _HOOKS.get(name, ()):
        setattr(module, f"get_hf_{name}_{layer}_hooks", _hooks)
    return module


gpt2, bert, roberta, gptj, gptneo, gptneox, t5, vit = map(family, FAMILIES)
