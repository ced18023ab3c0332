"""Data loaders: every replica reads samples of its own, all ranks of a replica the same."""

from smp_strategy.accelerate.host import Host

__all__ = ["LoaderHooks"]


class LoaderHooks(Host):
    """See the module docstring."""
