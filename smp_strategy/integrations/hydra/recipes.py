"""Recipe names as Hydra options, by a config source.

Degrees combine freely, so files for ``pp2``, ``pp4_mb16``, ``pp8_mb64`` ... would never end. A Hydra *config source*
answers instead: asked for ``smp/<name>.yaml`` it parses the name and returns the typed node. Files come earlier in the
search path, so an existing documented file of the same name takes precedence.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, final

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.recipe import parse_recipe
from smp_strategy.errors import ConfigError

__all__ = ["RecipeSource", "schema"]

GROUP = "smp"
TARGET = "smp_strategy.SMPStrategy"
# Shown by `--help` next to the files: enough to guess the grammar.
EXAMPLES = ["pp2_mb16", "pp4_1f1b_v2"]


def schema(**options: Any) -> DictConfig:
    """Typed node of the group ``smp``: ``_target_`` and every field of :class:`SMPConfig`.

    It is generated from :class:`SMPConfig`, so the two cannot drift apart. OmegaConf has no ``Literal`` and no union of
    a number and a list; those fields are plain strings, or ``Any``, here, and :class:`SMPConfig` checks them when the
    strategy is built.
    """
    hints = typing.get_type_hints(SMPConfig)
    fields: list[tuple[str, type, Any]] = [("_target_", str, dataclasses.field(default=TARGET))]
    for option in dataclasses.fields(SMPConfig):
        fields.append((option.name, _in_omegaconf(hints[option.name]), dataclasses.field(default=option.default)))
    typed = dataclasses.make_dataclass("SMPSchema", fields)
    node = OmegaConf.structured(typed(**options))
    assert isinstance(node, DictConfig)
    return node


def _in_omegaconf(hint: Any) -> Any:
    """Nearest OmegaConf type for an option of the type ``hint``."""
    if typing.get_origin(hint) is Literal:
        return str
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    if len(choices) == 1:
        return Any if typing.get_origin(choices[0]) is Mapping else _in_omegaconf(choices[0]) | None
    return Any if any(typing.get_origin(choice) is tuple for choice in choices) else hint


@final
class RecipeSource(ConfigSource):
    """Config source of the search path entry ``smp://``: one group whose options are all recipe names."""

    @staticmethod
    def scheme() -> str:
        """Scheme in the search path."""
        return GROUP

    def available(self) -> bool:
        """Always true: nothing has to be on disk."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether ``config_path`` is the group itself (or the root that holds it)."""
        return config_path.strip("/") in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        """Whether this source provides ``config_path``.

        Every name in the group counts, except those of the ConfigStore, which Hydra asks last. An invalid recipe name
        then fails in :meth:`load_config`, with a message that says which part of it is not understood.
        """
        group, _, name = self._normalize_file_name(config_path.strip("/")).partition("/")
        return group == GROUP and "/" not in name and not self._is_stored(name)

    def load_config(self, config_path: str) -> ConfigResult:
        """Typed node of a recipe name."""
        name = self._normalize_file_name(config_path).removeprefix(f"{GROUP}/").removesuffix(".yaml")
        try:
            node = schema(**parse_recipe(name))
        except ConfigError as error:
            raise ConfigCompositionException(
                f"{error} Files of this name were looked for first; `--info searchpath` lists where."
            ) from error
        return ConfigResult(provider=self.provider, path=self.full_path(), config=node, header={"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return a few examples; the options cannot be listed."""
        if config_path.strip("/") == GROUP:
            return [] if results_filter == ObjectType.GROUP else EXAMPLES
        return [] if results_filter == ObjectType.CONFIG else [GROUP]

    @staticmethod
    def _is_stored(name: str) -> bool:
        return ConfigStore.instance().get_type(f"{GROUP}/{name}") == ObjectType.CONFIG
