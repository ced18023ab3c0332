"""Collectives over replicas: what scripts gather, reduce and divide."""

from smp_strategy.accelerate.host import Host

__all__ = ["CollectiveHooks"]


class CollectiveHooks(Host):
    """See the module docstring."""
