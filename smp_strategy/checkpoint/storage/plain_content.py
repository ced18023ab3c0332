"""What users want to have in a checkpoint beside tensors, if it is of types that a file can be trusted with.

Files are read without running anything that stands in them, so objects of other classes would be written and never
read again. They are found before anything is written.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from smp_strategy.errors import ConfigError

__all__ = ["check_content"]

_LEAVES: Final = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Tensor, nn.Parameter, torch.Size, torch.device, torch.dtype),
)
_SEQUENCES: Final = (list, tuple, set)
_MAPPINGS: Final = (dict, OrderedDict)
_REMEDIES: Final = {
    "numpy": "Convert it: `tolist()` of an array or a number gives plain ones, `torch.as_tensor` a tensor.",
    "omegaconf": "Convert it: `OmegaConf.to_container(...)`.",
}
_REMEDY: Final = "Give its state instead, for example `scheduler.state_dict()` or `vars(args)`."


def check_content(value: Any, name: str) -> None:
    """Refuse what would not be read again.

    Args:
        value: to be written.
        name: what it is called, for messages.

    Raises:
        ConfigError: there is something else in it than dicts, lists, tuples and sets of tensors, numbers, strings,
            bytes and ``None``.
    """
    for path, leaf in _leaves(value, name):
        kind = type(leaf)
        if kind not in _LEAVES:
            remedy = _REMEDIES.get(kind.__module__.partition(".")[0], _REMEDY)
            raise ConfigError(
                f"`{path}` is of type {kind.__module__}.{kind.__qualname__}, which cannot be in a checkpoint: files "
                "are read without making objects of such classes, and hold dicts, lists, tuples and sets of tensors, "
                f"numbers, strings, bytes and None only. {remedy}"
            )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything that is no container, containers of other classes too, and where it is."""
    if isinstance(value, Mapping) and type(value) in _MAPPINGS:
        for key, item in value.items():
            yield from _leaves(key, f"{path}: key {key!r}")
            yield from _leaves(item, f"{path}[{key!r}]")
    elif type(value) in _SEQUENCES:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    else:
        yield path, value
