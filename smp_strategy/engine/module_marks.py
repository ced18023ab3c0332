"""Marks of users on modules: predicates for doors that offer ``set_tensor_parallelism`` and ``tp_register`` themselves.

The functions that set the marks are names of :mod:`smp_strategy`.
"""

from smp_strategy.tensor_parallel.plan.registry import check_classes
from smp_strategy.tensor_parallel.plan.user_choices import is_enabled

__all__ = ["check_classes", "is_enabled"]
