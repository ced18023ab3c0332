"""Environment variables of options: ``SMP_<OPTION>``, ``SMP_CONFIG`` for a recipe, and those of other programs.

The prefix is not ours alone: SageMaker's library reads variables that begin with it, and so may a cluster. A variable
that is nearly an option is a mistake of its author, because it would have no effect; any other one is not ours, and a
note at the start names it.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from smp_strategy.config.foreign_words import NAMES
from smp_strategy.config.parsing import parse
from smp_strategy.config.recipe import parse_recipe
from smp_strategy.errors import ConfigError

__all__ = [
    "ALIASES",
    "DOOR_OPTIONS",
    "ENV_PREFIX",
    "SELECTED",
    "canonical",
    "is_selected",
    "note_on_others",
    "options_in",
    "resolve_aliases",
    "text_of_variable",
    "told_by_origin",
]

ENV_PREFIX: Final = "SMP_"
ALIASES: Final = {"partitions": "pipeline_parallel_degree", "report": "smp_report"}
# Environment variables with the prefix that are not options.
NOT_OPTIONS: Final = frozenset(
    {"SMP_CONFIG", "SMP_AUTOLOAD", "SMP_START_TIME", "SMP_FULL_TRACEBACK", "SMP_LAUNCHER", "SMP_PROFILE"}
)
SELECTED: Final = "ACCELERATE_USE_SMP"
"""Variable with which `accelerate launch` selects this package."""
_WORDS: Final = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
# Options of a single integration, which reads them itself.
DOOR_OPTIONS: Final = frozenset({"loss_in_model", "loss_reduction", "training_outputs"})
# Variables of SageMaker's library about transfers between its devices.
_OF_SAGEMAKER: Final = frozenset(
    {
        "SMP_D2D_GPU_BUFFER_SIZE_BYTES",
        "SMP_DISABLE_D2D",
        "SMP_ENABLE_CROSS_NODE_D2D",
        "SMP_NCCL_THROTTLE_LIMIT",
    }
)
# Variables that people expect beside an argument of the same name.
_ARGUMENTS: Final = {
    "SMP_TIMEOUT": "Give `SMPStrategy(timeout=...)`, or Accelerate's `InitProcessGroupKwargs(timeout=...)`"
}
# Similarity from which a name counts as a misspelt option: above, for instance, CONFIG_PATH and CONFIG (0.71), below
# VIRTUAL_DEGREE and VIRTUAL_PIPELINE_DEGREE (0.76).
_NEAR: Final = 0.75


def canonical(name: str) -> str:
    """Name of an option whose alias may be given; other names are returned unchanged."""
    return ALIASES.get(name, name)


def resolve_aliases(options: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """``options`` by their own names; an alias beside its option with another value is a problem."""
    resolved = dict(options)
    for alias, name in ALIASES.items():
        if alias not in resolved:
            continue
        value = resolved.pop(alias)
        if resolved.get(name) is None:  # None is the default, which configuration files write out
            resolved[name] = value
        elif resolved[name] != value:
            problems.append(
                f"`{alias}` ({value}) is an alias of `{name}` ({resolved[name]}), but they differ. Leave one of them "
                "out."
            )
    return resolved


def options_in(environ: Mapping[str, str], hints: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Options from ``SMP_CONFIG`` (a recipe name) and ``SMP_<OPTION>`` variables; the latter win.

    Args:
        environ: environment variables.
        hints: type of every option.
        problems: gets the mistakes: variables of one option that differ, and misspelt ones.
    """
    options: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    if environ.get("SMP_CONFIG"):
        try:
            recipe = parse_recipe(environ["SMP_CONFIG"], "SMP_CONFIG=")
        except ConfigError as error:
            problems += error.problems
    variables: dict[str, str] = {}  # the variable of each option
    for variable in _with_prefix(environ):
        name = _option_of(variable)
        if name in hints:
            value = parse(environ[variable], hints[name])
            first = variables.setdefault(name, variable)
            if first != variable and options[name] != value:
                problems.append(
                    f"{first}={environ[first]} and {variable}={environ[variable]} are the same option, but they "
                    "differ. Unset one of them."
                )
            options[name] = value
        elif name in DOOR_OPTIONS:
            continue
        elif remedy := _ARGUMENTS.get(variable):
            problems.append(f"The environment variable {variable} is not read. {remedy}, or unset it.")
        elif near := _nearest(variable, hints):
            problems.append(
                f"The environment variable {variable} names no option of smp_strategy. Did you mean {near}? Rename or "
                "unset it."
            )
    return {**recipe, **options}


@contextmanager
def told_by_origin(given: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, Any]) -> Iterator[None]:
    """Add to errors where options come from that the user has not written, or not under their own names.

    Args:
        given: arguments, maybe by an alias; they win over ``environ``.
        environ: environment variables.
        defaults: default of every option.
    """
    try:
        yield
    except ConfigError as error:
        origins = _origins(given, environ, defaults)
        raise ConfigError([_with_origins(problem, origins, defaults) for problem in error.problems]) from None


def _origins(given: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Where each option comes from; empty if its name says so."""
    by = " (`accelerate launch` sets it from `smp_config`)" if environ.get("ACCELERATE_USE_SMP") else ""
    origins: dict[str, str] = {}
    if recipe := environ.get("SMP_CONFIG", ""):
        with suppress(ConfigError):  # a problem of its own
            origins |= dict.fromkeys(parse_recipe(recipe), f"SMP_CONFIG={recipe}{by}")
    for variable in _with_prefix(environ):
        if (name := _option_of(variable)) in defaults:
            origins[name] = f"the environment variable {variable}{by}"
    origins |= {name: f"its alias `{alias}`" for alias, name in ALIASES.items() if alias in given}
    return origins | {name: "" for name in given if name in defaults and given[name] is not None}


def _with_origins(problem: str, origins: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    told = []
    for name, value in dict(re.findall(r"`(\w+)(?:=([^`]+))?`", problem.partition(". ")[0])).items():
        if origin := origins.get(name):
            told.append(f"`{name}` comes from {origin}.")
        elif name not in origins and name in defaults and value == str(defaults[name]):
            told.append(f"`{name}={value}` is its default.")
    return " ".join([problem, *told])


def text_of_variable(environ: Mapping[str, str], name: str) -> str | None:
    """Text of the variable for the option ``name``; ``None`` if it is not set."""
    return next((environ[each] for each in _with_prefix(environ) if _option_of(each) == name), None)


def note_on_others(environ: Mapping[str, str], hints: Mapping[str, Any]) -> str | None:
    """Sentence on the variables with our prefix that are not ours; ``None`` if there are none."""
    ours = {*hints, *DOOR_OPTIONS}
    others = [each for each in _with_prefix(environ) if _option_of(each) not in ours]
    if not others:
        return None
    shown = [f"{each} (of SageMaker's library)" if each in _OF_SAGEMAKER else each for each in others]
    return f"Environment variables that name no option of smp_strategy have no effect on it: {', '.join(shown)}."


def _with_prefix(environ: Iterable[str]) -> list[str]:
    return [each for each in sorted(environ) if each.startswith(ENV_PREFIX) and each not in NOT_OPTIONS]


def _option_of(variable: str) -> str:
    return canonical(variable.removeprefix(ENV_PREFIX).lower())


def _nearest(variable: str, hints: Iterable[str]) -> str | None:
    """The variable that ``variable`` probably is meant to be."""
    if variable in _OF_SAGEMAKER:
        return None
    word = variable.removeprefix(ENV_PREFIX).lower()
    if meant := next((option for option, names in NAMES.items() if word in names.split()), None):
        return ENV_PREFIX + meant.upper()
    known = [name.upper() for name in (*hints, *ALIASES, *DOOR_OPTIONS)]
    known += [name.removeprefix(ENV_PREFIX) for name in NOT_OPTIONS]
    near = difflib.get_close_matches(variable.removeprefix(ENV_PREFIX).upper(), known, n=1, cutoff=_NEAR)
    return ENV_PREFIX + near[0] if near else None


def is_selected(environ: Mapping[str, str]) -> bool | None:
    """Value of ``ACCELERATE_USE_SMP``; ``None`` if it is not set.

    Raises:
        ConfigError: it is neither true nor false.
    """
    text = environ.get(SELECTED, "").strip().lower()
    if text and text not in _WORDS:
        raise ConfigError(f"{SELECTED} must be true or false, but is {environ[SELECTED]!r}.")
    return _WORDS.get(text)
