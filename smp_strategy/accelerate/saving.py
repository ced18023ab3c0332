"""Saving and loading: files of one process, whatever the layout."""

from smp_strategy.accelerate.host import Host

__all__ = ["SavingHooks"]


class SavingHooks(Host):
    """See the module docstring."""
