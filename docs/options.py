"""Write the reference of options, ``docs/options.md``, and their typed keyword arguments for editors::

    make options

Both come from the dataclasses of options and the docstrings under their fields; a test compares them.
"""

import dataclasses
import re
import sys
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from smp_strategy.config.config import option_types
from smp_strategy.config.option_signature import concerns, option_texts

ROOT = Path(__file__).parents[1]
KEYWORDS = "smp_strategy/config/keywords.py"
PAGE = "docs/options.md"

PAGE_HEAD = """# Options

All options of `SMPStrategy`, `SMPPlugin`, `SMPConfig`, and `plan_partition`. In files and variables they have the same
names: `microbatches: 8` under `smp_config:`, `SMP_MICROBATCHES=8`, `--trainer.strategy.microbatches 8`. Names and
defaults are those of SageMaker's model parallel library unless an option says otherwise. The most frequent ones have a
short form, the *recipe*: `pp4_zbv_mb16`, `tp2_sdp2`, `mics2x2`, `zero1`. It is `Trainer(strategy="smp_pp4_zbv_mb16")`,
`smp=pp4_zbv_mb16` in Hydra, `smp_config: pp4_zbv_mb16` for Accelerate, and `SMP_CONFIG=pp4_zbv_mb16` anywhere.

`make options` writes this page from `smp_strategy/config/options.py` and its neighbours.
"""
KEYWORDS_HEAD = '''"""Keyword arguments of calls that take options, for type checkers and editors.

`make options` writes this file, from the docstrings under the fields of the dataclasses of options.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

__all__ = ["OptionKeywords"]


class OptionKeywords(TypedDict, total=False):
    """Options, all of which may be left out; an unpacked ``dict`` of any names is allowed as well."""

    partitions: int | None
    """Alias of ``pipeline_parallel_degree``."""
    report: Literal["quiet", "short", "full"]
    """Alias of ``smp_report``."""
'''


def page() -> str:
    """The reference: a section per concern."""
    hints, texts = option_types(), option_texts()
    lines = [PAGE_HEAD]
    for concern in concerns():
        # Lines of the docstring above the first blank one.
        lines.append(f"## {concern.__doc__.split('.')[0]}\n")
        for field in dataclasses.fields(concern):
            kind = f"`{shown(hints[field.name])}`, default `{field.default!r}`"
            text = texts[field.name].replace("``", "`")
            lines.append(wrapped(f"**`{field.name}`** ({kind}). {text}", "- ", "  "))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def keywords() -> str:
    """The module with the typed dictionary."""
    lines = [KEYWORDS_HEAD.rstrip("\n")]
    for name, text in option_texts().items():
        lines += [f"    {name}: {shown(option_types()[name]).replace('tuple[', 'Sequence[').replace(', ...]', ']')}"]
        lines += [wrapped(f'"""{text}"""', "    ", "    ")]
    return "\n".join(lines) + "\n"


def wrapped(text: str, first: str, later: str) -> str:
    """``text`` in lines of at most 120 characters."""
    return textwrap.fill(
        text, 120, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )


def shown(hint: object) -> str:
    """A type as one writes it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        words = ", ".join(f'"{word}"' for word in arguments)
        return f"Literal[{words}]"
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(shown, arguments))
    if origin is tuple:
        return f"tuple[{shown(arguments[0])}, ...]"
    if origin is Mapping:
        return f"Mapping[{', '.join(map(shown, arguments))}]"
    return "None" if hint is type(None) else re.sub(r"<class '(\w+)'>", r"\1", str(hint))


def main(folder: Path) -> None:
    """Write both files below ``folder``."""
    (folder / PAGE).write_text(page())
    (folder / KEYWORDS).write_text(keywords())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
