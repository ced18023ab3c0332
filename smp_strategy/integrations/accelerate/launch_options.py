"""Options of a launch: the section ``smp_config`` of a file becomes environment variables of the processes.

``accelerate launch`` starts the processes and knows their number; the Accelerator is made in each of them, by a script
that does not mention a layout. Accelerate itself passes its options by environment variables, so we do the same.
Everything that can be checked before a process starts is checked here: names, values, and whether the degrees fit the
number of processes. Variables of the shell take precedence over the file.
"""

from collections.abc import Mapping
from typing import Any, final

from smp_strategy.config.config import SMPConfig, option_types, unknown_option
from smp_strategy.config.degree_check import check_degree
from smp_strategy.config.parsing import as_dict, as_text, as_tuple, fits, parse
from smp_strategy.config.recipe import parse_recipe
from smp_strategy.config.variables import DOOR_OPTIONS, ENV_PREFIX, SELECTED, canonical, resolve_aliases
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate.own_options import take_own, wrong_own

__all__ = ["LaunchOptions", "check_processes"]

RECIPE = "SMP_CONFIG"


@final
class LaunchOptions:
    """Content of ``smp_config`` in a file that ``accelerate launch`` reads.

    Args:
        node: a recipe such as ``pp2_sdp2``, or options by their names, with an optional key ``recipe``; ``None`` or
            ``True`` if the script or the environment gives the options. ``False`` is not allowed.
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        if isinstance(node, str):
            node = {"recipe": node}
        elif node is None or node is True:
            node = {}
        if not isinstance(node, Mapping):
            raise ConfigError(f"`smp_config` must hold options by their names, or a recipe like pp2, but is {node!r}.")
        self._recipe = node.get("recipe")
        problems: list[str] = []
        if self._recipe is not None:
            try:
                parse_recipe(str(self._recipe), "recipe: ")
            except ConfigError as error:
                problems += error.problems
        self._texts = {
            str(name): _text_of(str(name), value, problems) for name, value in node.items() if name != "recipe"
        }
        resolve_aliases({str(name): value for name, value in node.items()}, problems)
        if problems:
            raise ConfigError([f"In `smp_config`: {problem}" for problem in problems])

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables for processes that inherit ``environ``; options that are set there are left out."""
        given = {canonical(name.removeprefix(ENV_PREFIX).lower()) for name in environ if name.startswith(ENV_PREFIX)}
        added = {SELECTED: "true"}
        if environ.get(RECIPE):
            given |= set(parse_recipe(environ[RECIPE]))
        elif self._recipe is not None:
            added[RECIPE] = str(self._recipe)
        for name, text in self._texts.items():
            if canonical(name) not in given:
                added[ENV_PREFIX + name.upper()] = text
        return added


def _text_of(name: str, value: Any, problems: list[str]) -> str:
    """Text of ``value`` in an environment variable."""
    text = as_text(value)
    if name in DOOR_OPTIONS:
        problems += wrong_own(name, text)
        return text
    hint = option_types().get(canonical(name))
    if hint is None:
        problems.append(unknown_option(name, DOOR_OPTIONS))
        return text
    value = as_dict(as_tuple(value))
    is_container = isinstance(value, tuple | Mapping)
    if is_container and fits(value, hint) and parse(text, hint) != value:
        problems.append(
            f"`{name}` is {value!r}, which cannot be written as text: {text!r} would be read as something else. "
            f"Give it in the script: SMPPlugin({name}=...)."
        )
    return text


def check_processes(environ: Mapping[str, str], num_processes: int, num_machines: int = 1) -> None:
    """Refuse an invalid launch before any process is started.

    ``environ`` has all variables of the processes, which are counted over all machines, equally many on each.
    """
    _, problems = take_own({}, environ)
    try:
        config = SMPConfig.from_variables(environ)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    if num_processes % num_machines:
        raise ConfigError(
            f"`num_processes` ({num_processes}, on all machines together) must be a multiple of `num_machines` "
            f"({num_machines})."
        )
    # No degree at all: as many stages as there are processes, which fits any number.
    pp = config.pipeline_parallel_degree or 1
    try:
        check_degree(pp, num_processes, dp_shard=config.sharded_data_parallel_degree, tp=config.tensor_parallel_degree)
    except ConfigError as error:
        many = f"`num_processes` ({num_processes}) counts the processes of all machines."
        raise ConfigError([f"{problem} {many}" for problem in error.problems]) from None
