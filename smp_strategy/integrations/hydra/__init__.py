"""The Hydra front door: ``smp=pp2`` in any Hydra application.

A layout should be one word on the command line, and a typed, validated node in the configuration. Installing this
package is enough for that, because Hydra finds ``hydra_plugins.smp_strategy``, which names the two classes below.

===================== ============================================================================================
``smp=pp2``           a documented file of the group ``smp`` (``configs/smp`` in the repository) ``smp=pp4_zbv_mb16``
any other recipe: :class:`RecipeSource` reads the options off the name ``smp=base``          the schema: every option of
:class:`~smp_strategy.config.config.SMPConfig` with its type and default ``smp_rundir=shared`` one run directory for all
ranks, also under ``torchrun`` ``trainer=smp``       the application's own ``trainer/default.yaml`` with ``strategy:
${smp}`` =====================
============================================================================================

The node is at ``smp`` and ``strategy: ${smp}`` hands it to the Trainer; ``smp@trainer.strategy: pp2`` puts it there
directly. The node names every option, so ``SMP_*`` environment variables have no say in a Hydra application: the
configuration that Hydra saves is the whole truth. Nothing here imports torch while a configuration is composed,
except under ``torchrun``, where the ranks must agree on a directory.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from smp_strategy.integrations.hydra.recipes import RecipeSource, schema
from smp_strategy.integrations.hydra.resolvers import register_resolvers

__all__ = ["RecipeSource", "SMPSearchPathPlugin", "register_resolvers", "schema"]


class SMPSearchPathPlugin(SearchPathPlugin):
    """Adds the groups, the recipe names, the schema and the resolvers; Hydra calls it before it composes anything.

    The groups go to the end of the search path, so that an application's own files of the same name win.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Do all of the above; Hydra may call it any number of times in one process."""
        search_path.append(provider="smp_strategy", path="pkg://smp_strategy.configs")
        search_path.append(provider="smp_strategy", path="smp://")
        ConfigStore.instance().store(group="smp", name="base", node=schema(), provider="smp_strategy")
        register_resolvers()
