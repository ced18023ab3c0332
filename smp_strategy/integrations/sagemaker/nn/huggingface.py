"""``smp.nn.huggingface``: translations between names of Hugging Face and those of SageMaker's layers.

SageMaker's library puts layers of its own into Hugging Face's models, with other names and shapes. Here a model keeps
its layers, so its state dict has Hugging Face's names already, and the translations return what they get. Files that
SageMaker's library has written are read by ``smp import``.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from smp_strategy.errors import CheckpointError

__all__ = ["FAMILIES", "bert", "family", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit"]

FAMILIES: Final = ("gpt2", "bert", "roberta", "gptj", "gptneo", "gptneox", "t5", "vit")
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


def family(name: str) -> ModuleType:
    """Make the module of a family of models, with its translations."""
    module = ModuleType(f"{__name__}.{name}", f"Translations for {name}, which change nothing.")
    names = (f"translate_state_dict_to_hf_{name}", f"translate_hf_state_dict_to_smdistributed_{name}")
    # Until version 1.9.
    older = (f"translate_hf_{name}_state_dict_to_smdistributed", "translate_hf_state_dict_to_smdistributed")
    for call in (*names, *older):
        setattr(module, call, _same)
    return module


gpt2, bert, roberta, gptj, gptneo, gptneox, t5, vit = map(family, FAMILIES)
