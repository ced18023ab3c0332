"""Hydra integration: ``smp=pp2`` in any Hydra application.

A layout is one word on the command line, and a typed, validated node in the configuration. Installing this package is
enough, because Hydra finds ``hydra_plugins.smp_strategy``, which names the two classes below.

===================== ============================================================================================
``smp=pp2``           a documented file of the group ``smp`` (``configs/smp`` in the repository)
``smp=pp4_zbv_mb16``  any other recipe: :class:`RecipeSource` parses the options from the name
``smp=base``          the schema: every option of :class:`~smp_strategy.config.config.SMPConfig`, typed, with default
``smp=sagemaker``     a JSON file of SageMaker's library: ``smp.file=parameters.json``
``smp_rundir=shared`` one run directory for all ranks, also under ``torchrun``
``trainer=smp``       the application's own ``trainer/default.yaml`` with ``strategy: ${smp}``
===================== ============================================================================================

The node is at ``smp`` and ``strategy: ${smp}`` hands it to the Trainer; ``smp@trainer.strategy: pp2`` puts it there
directly. The node names every option, so ``SMP_*`` environment variables are ignored in a Hydra application: the
configuration that Hydra saves is complete. Nothing here imports torch while a configuration is composed, except under
``torchrun``, where the ranks must agree on a directory.

Reading order::

    __init__.py           SMPSearchPathPlugin: adds the groups, recipe names, schema and resolvers to Hydra
    recipes.py            RecipeSource, a Hydra config source; the typed node made from SMPConfig
    sagemaker_layout.py   the node of a JSON file of SageMaker's library
    resolvers.py          ${smp_now:...}, ${smp_rank0:...}: one run directory, ranks and their number in a configuration
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from smp_strategy.integrations.hydra.recipes import RecipeSource, schema
from smp_strategy.integrations.hydra.resolvers import register_resolvers
from smp_strategy.integrations.hydra.sagemaker_layout import SAGEMAKER, sagemaker_node

__all__ = ["RecipeSource", "SMPSearchPathPlugin", "register_resolvers", "schema"]


class SMPSearchPathPlugin(SearchPathPlugin):
    """Search path plugin that adds the groups, recipe names, schema and resolvers; Hydra calls it before composing.

    The groups go to the end of the search path, so an application's own files of the same name take precedence.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add all of the above; Hydra may call this any number of times in a process."""
        search_path.append(provider="smp_strategy", path="pkg://smp_strategy.configs")
        search_path.append(provider="smp_strategy", path="smp://")
        store = ConfigStore.instance()
        store.store(group="smp", name="base", node=schema(), provider="smp_strategy")
        store.store(group="smp", name=SAGEMAKER, node=sagemaker_node(schema), provider="smp_strategy")
        register_resolvers()
