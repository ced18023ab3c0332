"""``smp=sagemaker smp.file=parameters.json``: a configuration of SageMaker's library as a layout.

The node has every option. Each refers to the file, which a resolver reads, so that an override of a single option wins
over it, and the configuration that Hydra saves can be read.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from omegaconf import MISSING, DictConfig, OmegaConf

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sagemaker_options import read_sagemaker

__all__ = ["SAGEMAKER", "option_in_file", "sagemaker_node", "strategy_without_file"]

SAGEMAKER: Final = "sagemaker"


def sagemaker_node(schema: Callable[..., DictConfig]) -> DictConfig:
    """Typed node of the group ``smp`` with a further entry ``file``; ``schema`` makes that of all options."""
    options = {each.name: f"${{smp_sagemaker:${{.file}},{each.name}}}" for each in dataclasses.fields(SMPConfig)}
    node = schema(**options)
    OmegaConf.set_struct(node, False)
    with_file: Any = OmegaConf.create({"_target_": f"{__name__}.strategy_without_file", "file": MISSING})
    for name in options:
        with_file._set_item_impl(name, node._get_node(name))
    assert isinstance(with_file, DictConfig)
    return with_file


def option_in_file(file: str, name: str) -> Any:
    """Value of an option in a JSON file of SageMaker's."""
    return getattr(SMPConfig(**read_sagemaker(file).options), name)


def strategy_without_file(file: str, **options: Any) -> Any:
    """Build the strategy from a node's options, which the ``file`` was read into."""
    import smp_strategy

    del file
    return smp_strategy.SMPStrategy(**options)
