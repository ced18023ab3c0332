"""Fresh interpreters that do not import PyTorch, which would take ten times as long as what they are for.

A code that begins with ``STAND_IN`` can import the parts of this package that need no more of PyTorch than to learn
that there is no process group.
"""

__all__ = ["STAND_IN"]

STAND_IN = """
import sys, types
class StandIn(types.ModuleType):
    is_initialized = staticmethod(lambda: False)
    def __getattr__(self, name):
        return object
for name in ("torch", "torch.distributed", "smp_strategy.distributed.torch_private"):
    sys.modules[name] = StandIn(name)
sys.modules["torch"].distributed = sys.modules["torch.distributed"]
"""
