"""The strategy's hooks for checkpoints: one ordinary Lightning file, whatever the layout that writes or reads it."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.lightning.communication import CommunicationHooks

__all__ = ["CheckpointHooks", "unwrap"]

# Where the engine's own state stands in a checkpoint; plain Lightning passes over it.
CHECKPOINT_KEY = "smp_strategy"


class CheckpointHooks(CommunicationHooks):
    """The strategy's hooks that save and load. See the module's docstring."""

    config: SMPConfig
    _engine: Engine | None

    @property
    def engine(self) -> Engine:
        """The engine of the module that is being trained; exists from ``setup`` on."""
        raise NotImplementedError

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights under their plain names on global rank 0, nothing on the others. Collective."""
        return self.engine.full_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """All of the optimizer's state as one process has it, on global rank 0. Collective."""
        return self.engine.full_optimizer_state(unwrap(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the file on global rank 0; the Trainer lets the others wait. Collective."""
        checkpoint[CHECKPOINT_KEY] = self.engine.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    # Loading

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded when the engine exists, which remembers them for tensors without memory."""
        return self.config.delayed_parameter_initialization

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's share of the weights; before the first step that is all of them."""
        module = self.lightning_module
        assert module is not None
        if self._engine is not None and self._engine.serves(module):
            self._engine.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's share of the optimizers' state and the engine's own."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.engine.load_optimizer_state(unwrap(optimizer), state)
        if CHECKPOINT_KEY in checkpoint:
            self.engine.load_state(checkpoint[CHECKPOINT_KEY])


def unwrap(optimizer: Any) -> Optimizer:
    """The user's optimizer inside a LightningOptimizer."""
    unwrapped: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return unwrapped
