"""``smp.DistributedOptimizer``: an optimizer whose gradients are final before its step, with loss scaling for float16.

The wrapper is an ``Optimizer`` itself, so learning rate schedulers take either it or the optimizer inside.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer

from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.engine.updates.optimizer_steps import evaluated_first, trains, updating
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.integrations.sagemaker.model_state import (
    full_optimizer_state,
    load_optimizer_state,
    local_optimizer_state,
)
from smp_strategy.integrations.sagemaker.run_state import RunState, current_run

if TYPE_CHECKING:
    from smp_strategy.integrations.sagemaker.distributed_model import DistributedModel

__all__ = ["DistributedOptimizer"]

# SageMaker's defaults.
_RULES: Final[Mapping[str, Any]] = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}
_SCALER: Final = "loss_scaler"


class DistributedOptimizer(Optimizer):
    """An optimizer of the parameters of a ``smp.DistributedModel``.

    Args:
        optimizer: of the model's parameters, created after the model was wrapped or before.
        static_loss_scale: factor of the loss, if anything computes in float16.
        dynamic_loss_scale: adapt the factor instead.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_scale``, ``delayed_shift`` and
            ``consecutive_hysteresis`` of the dynamic factor, with SageMaker's defaults.

    Attributes:
        optimizer: as given.
        model: the wrapped model.

    Raises:
        ConfigError: it has no parameters of a wrapped model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        # `Optimizer.__init__` would copy the groups.
        run = current_run()
        self.optimizer = optimizer
        self.model = _model_of(optimizer, run)
        self._scaler: GradScaler | None = None
        self._overflow = False
        # Norm of all gradients before the last clipping. Scripts with sharding log it under this name.
        self._global_grad_norm: Tensor | float = 0.0
        is_half = run.config.fp16 or run.config.fp16_params
        if is_half:
            rules = ScalingRules.static(static_loss_scale or 1.0)
            if dynamic_loss_scale:
                rules = _rules(dynamic_loss_args or {})
            self._scaler = GradScaler(rules, lambda *given: self.model.engine.unscale(*given), lambda: [optimizer])
        elif dynamic_loss_scale or static_loss_scale not in (None, 1.0):
            run.note("The loss scale has no effect: nothing computes in float16 (`fp16`).")
        run.optimizers.append(self)
        engine = self.model.engine
        known = [each for each in engine.optimizers if each is not optimizer]
        engine.attach(self.model.module, [*known, optimizer])

    # The step

    def scale_of_backward(self) -> float:
        """Factor of the loss in the next backward."""
        if self._scaler is None:
            return 1.0
        self._scaler.scale([])  # brings gradients that are there to this scale
        return self._scaler.get_scale()

    @property
    def loss_scale(self) -> float:
        """Factor of the loss."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients were infinite or no numbers."""
        return self._overflow

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks by their global norm; returns the norm before. Collective."""
        engine = self.model.engine
        self.make_final()
        parameters = [each for group in self.param_groups for each in group["params"]]
        self._global_grad_norm = engine.clip_grad_norm_(parameters, max_norm, norm_type)
        return self._global_grad_norm

    def make_final(self) -> None:
        """Reduce gradients over ranks and unscale them. Collective."""
        engine = self.model.engine
        with engine.views.put_aside():
            engine.reduce_gradients()
            if self._scaler is not None:
                self._scaler.ensure_unscaled(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless gradients have overflowed. Collective."""
        engine = self.model.engine
        closure = evaluated_first(closure, self.optimizer)
        if engine.partition is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.make_final()
        arguments = () if closure is None else (closure,)
        with updating(engine, self.optimizer) as norm:
            if self._scaler is None:
                returned = self.optimizer.step(*arguments)
            else:
                returned = self._scaler.step(self.optimizer, *arguments)
        self._global_grad_norm = self._global_grad_norm if norm is None else norm
        if self._scaler is not None:
            self._overflow = self._scaler.has_skipped(self.optimizer)
            self._scaler.update()
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """State dict of the whole optimizer. Collective over the ranks of a replica; if it is sharded, over all."""
        return self._with_scaler(full_optimizer_state(self))

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """State dict of this rank's part, with a key ``_smp_is_partial``.

        Args:
            gather_if_shard: accepted; a part never contains the shards of other ranks.
        """
        return self._with_scaler(local_optimizer_state(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of the whole optimizer, or this rank's part of one. The latter is collective."""
        state = dict(state_dict)
        saved = state.pop(_SCALER, None)
        if self._scaler is not None and saved:
            self._scaler.load_state_dict(saved)
        load_optimizer_state(self, state)

    def _with_scaler(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._scaler is None else {**state, _SCALER: self._scaler.state_dict()}

    def scaler_state_dict(self) -> dict[str, Any]:
        """State of the loss scale, for the ``user_content`` of a checkpoint; empty if there is none."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_scaler_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the loss scale."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state)

    # What schedulers and scripts read

    @property
    def param_groups(self) -> Any:
        """Groups of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Parameters of each group, with whole shapes. Scripts with sharding save names and shapes in this order."""
        return [list(group["params"]) for group in self.param_groups]

    @property
    def state(self) -> Any:
        """State of the optimizer inside: that of this rank's parameters."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> Any:
        """Defaults of the optimizer inside."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> Any:
        raise UnsupportedError("A `smp.DistributedOptimizer` cannot be pickled. Save its `state_dict()`.")


def _model_of(optimizer: Optimizer, run: RunState) -> "DistributedModel":
    if isinstance(optimizer, DistributedOptimizer):
        raise ConfigError("The optimizer is a `smp.DistributedOptimizer` already. Wrap it once.")
    for model in run.models:
        if trains(optimizer, model.module):
            return model
    raise ConfigError(
        f"{type(optimizer).__name__} has no parameters of a wrapped model. Wrap the model first (`model = "
        "smp.DistributedModel(model)`), and create the optimizer with `model.parameters()`."
    )


def _rules(given: Mapping[str, Any]) -> ScalingRules:
    if unknown := sorted(set(given) - set(_RULES)):
        raise ConfigError(
            f"`dynamic_loss_args` got unknown entries: {', '.join(unknown)}. Known are: {', '.join(_RULES)}."
        )
    rules = {name: type(default)(given.get(name, default)) for name, default in _RULES.items()}
    return ScalingRules.of(PrecisionOptions(**rules))
