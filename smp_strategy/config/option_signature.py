"""Signatures and docstrings in which every option has its type, default and sentence.

The source is the dataclasses of options: a field is an option, and the docstring under it explains it. Python keeps no
docstrings of fields, so they are read from the source files. Calls that take ``**options`` get a generated signature
and docstring, for ``help()``, LightningCLI's ``--help`` and notebooks. Type checkers and editors run nothing; for them
``docs/options.py`` writes :mod:`smp_strategy.config.keywords` from the same source.
"""

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final

from smp_strategy.config.config import SMPConfig, option_types

__all__ = ["concerns", "option_texts", "with_option_docs", "with_option_signature"]

# In the docstrings of calls with `**options`; their entries replace it.
_ENTRY: Final = re.compile(r"^( +)options: .*?\n(?=\s*\n| *\w+:)", re.MULTILINE | re.DOTALL)
_WIDTH: Final = 120


def concerns() -> tuple[type, ...]:
    """The dataclasses of options that :class:`SMPConfig` inherits, in their order there."""
    return tuple(each for each in SMPConfig.__mro__[1:] if dataclasses.is_dataclass(each))


@functools.cache
def option_texts() -> Mapping[str, str]:
    """Sentences under each option, as one line; empty where the source files are not there."""
    texts: dict[str, str] = {}
    for name in dict.fromkeys(each.__module__ for each in concerns()):
        try:
            tree = ast.parse(inspect.getsource(sys.modules[name]))
        except OSError:
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                texts |= _texts_under_fields(node.body)
    return {name: texts[name] for name in _fields() if name in texts}


def _fields() -> dict[str, Any]:
    """Option: its default, by concern."""
    return {field.name: field.default for each in concerns() for field in dataclasses.fields(each)}


def _texts_under_fields(body: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def with_option_docs(docstring: str | None) -> str | None:
    """``docstring`` with an entry per option instead of that of ``options`` under ``Args``."""
    return _ENTRY.sub(_entries, docstring) if docstring and option_texts() else docstring


def _entries(match: re.Match[str]) -> str:
    indent = match[1]
    wrap = functools.partial(textwrap.fill, width=_WIDTH, break_on_hyphens=False, break_long_words=False)
    texts = [f"{name}: {text}" for name, text in option_texts().items()]
    return "".join(wrap(text, initial_indent=indent, subsequent_indent=indent + "    ") + "\n" for text in texts)


def with_option_signature(call: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``call``, which takes ``**options``, with a signature that names each option."""

    @functools.wraps(call)
    def named(self: object, *args: Any, **options: Any) -> None:
        call(self, *args, **options)

    types, key = option_types(), inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(call)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, key, default=default, annotation=types[name]) for name, default in _fields().items()
    ]
    vars(named)["__signature__"] = signature.replace(parameters=[*own, *options])
    annotations = {name: hint for name, hint in call.__annotations__.items() if name != "options"}
    named.__annotations__ = annotations | {option.name: option.annotation for option in options}
    return named
