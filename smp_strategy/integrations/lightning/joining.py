"""The beginning of a run: its ranks meet, compare their settings, and join the process group."""

from typing import Any, Final

import torch.distributed as dist

from smp_strategy.distributed.agreement.first_meeting import FirstMeeting
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import SETTINGS
from smp_strategy.distributed.door_words import OF_LIGHTNING, speak
from smp_strategy.distributed.failure import begin_run
from smp_strategy.distributed.process_groups import carry_host_tensors
from smp_strategy.integrations.lightning.environment import backend_for

__all__ = ["join_group", "meet_first"]

_COMPARING: Final = "a comparison of the ranks' settings, at the beginning of a run"


def meet_first(trainer: Any, settings: dict[str, str]) -> dist.Store | None:
    """Compare ``settings`` before there is a process group; ``None``: there is one, or there are no other ranks.

    Returns:
        The store for the process group.
    """
    strategy = trainer.strategy
    environment, launcher = strategy.cluster_environment, strategy.launcher
    num_ranks = strategy.num_nodes * len(strategy.parallel_devices or ())
    # MPI has a rendezvous of its own.
    if dist.is_initialized() or num_ranks == 1 or strategy.process_group_backend == "mpi":
        return None
    rank, address = environment.global_rank(), (environment.main_address, environment.main_port)
    lost = str if launcher is None else launcher.lost
    return FirstMeeting(address, rank, num_ranks, timeout=strategy.timeout, lost=lost).compare(settings)


def join_group(strategy: Any, settings: dict[str, str], store: dist.Store | None) -> None:
    """Join the process group, and compare ``settings`` if there was no first meeting. Collective.

    Args:
        strategy: The strategy.
        settings: Settings of this rank.
        store: Store of the first meeting; ``None``: there was none.
    """
    backend = strategy.process_group_backend or backend_for(strategy.parallel_devices or [])
    given = {"timeout": strategy.timeout, "store": store}
    options = {name: value for name, value in given.items() if value is not None}
    distributed = strategy.tree.fabric("utilities.distributed")
    distributed._init_dist_connection(strategy.cluster_environment, backend, **options)
    carry_host_tensors(strategy.root_device.type)
    begin_run()
    speak(OF_LIGHTNING)
    if store is None:
        Ledger().note(SETTINGS, settings).compare(_COMPARING)
