"""``smp.DistributedModel``: a module that an engine runs, with the methods of SageMaker's wrapper.

Communication hooks of DistributedDataParallel, as options: which dtype gradients are sent in, and in which hops.

A hook of the user's own would get buckets of gradients to reduce as it likes. Here reductions also run over stages and
shards, with buckets of their own, so only PyTorch's hooks that change the dtype are taken over, and the hierarchical
one of this package.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from smp_strategy import hierarchical_allreduce_hook
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.left_sharded import leave_spread, restore_left
from smp_strategy.engine.model_calls.model_outputs import pack
from smp_strategy.engine.own_samples import SameBatches, own_outputs
from smp_strategy.errors import SMPError, UnsupportedError
from smp_strategy.integrations.sagemaker.model_state import (
    LocalParts,
    full_model_state,
    load_model_state,
    local_model_state,
)
from smp_strategy.integrations.sagemaker.nn.transformer_layers import name_layers
from smp_strategy.integrations.sagemaker.run_state import current_run
from smp_strategy.integrations.sagemaker.step_function import (
    StepValue,
    has_gradients,
    losses_of_microbatch,
    note_losses,
)
from smp_strategy.integrations.sagemaker.step_values import StepInputs, over_microbatches

__all__ = ["DistributedModel", "options_for"]


Hook = Callable[[Any, Any], Any]
_OUTSIDE: Final = (
    "The model is called with gradients outside of a function with `@smp.step`: put the call, its loss and "
    "`model.backward(loss)` into such a function, or call the model under `torch.no_grad()`."
)


_SENT: Final = (
    "The ranks of a replica have read different batches. As in SageMaker's library, those of its first rank are used, "
    "which is sent to the others in each step. To save that, let all of them read the same: `DistributedSampler(..., "
    "num_replicas=smp.dp_size(), rank=smp.dp_rank())`, or a generator with the same seed on all ranks."
)


class DistributedModel(LocalParts):
    """A model whose calls in functions with ``@smp.step`` run over the ranks.

    Partition and placement happen in the first step, as in SageMaker's library if it has a pipeline: stages and
    checkpointing may be set until then. The module itself stays the same object, with the same names. With ``fp16`` or
    ``bf16`` its parameters become float32 masters, also those that were made in half precision.

    Args:
        module: the model, whole on every rank, or on the meta device under ``smp.delay_param_initialization``.
        trace_device: ``gpu`` or ``cpu``: where costs are measured, if they are.
        trace_execution_times: measure execution times instead of modelling them.
        overlapping_allreduce: average gradients over replicas while backward runs.
        backward_passes_per_step: number of steps after which gradients are averaged over replicas.
        average_grads_across_microbatches: whether the loss of a batch is the mean of those of its microbatches, and
            not their sum.
        bucket_cap_mb: accepted; buckets are the library's.
        trace_memory_usage: measure memory instead of modelling it.
        broadcast_buffers: whether replicas follow the buffers of the first one.
        gradient_as_bucket_view: accepted.
        find_unused_parameters: accepted; unused parameters need no search.
    """

    def __init__(  # noqa: PLR0913  # SageMaker's
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        run = current_run()
        if isinstance(module, DistributedModel):
            raise SMPError("The module is a `smp.DistributedModel` already. Wrap the model once.")
        if bucket_cap_mb != 25:
            run.note("`bucket_cap_mb` has no effect: gradients are averaged in buckets of the library.")
        measures = trace_execution_times or trace_memory_usage or run.config.trace_execution_times
        config = dataclasses.replace(
            run.config,
            broadcast_buffers=broadcast_buffers,
            trace_execution_times=trace_execution_times or run.config.trace_execution_times,
            trace_memory_usage=trace_memory_usage,
            trace_device=cast(Any, trace_device) if measures and run.device.type != "cpu" else None,
            delayed_parameter_initialization=run.config.delayed_parameter_initialization or _has_meta(module),
        )
        restore_left(module)
        self.module = module
        self._overlaps = overlapping_allreduce
        self._passes = backward_passes_per_step
        self._averages = average_grads_across_microbatches
        self._num_passes = 0
        self._kinds: dict[Any, tuple[int, bool]] = {}
        self._post_partition: OrderedDict[int, Hook] = OrderedDict()
        self._post_step: OrderedDict[int, Hook] = OrderedDict()
        self._was_told = False
        # Ranks that split layers between them may have read samples of their own.
        kind = "mp" if run.config.prescaled_batch else "pp"
        group, tell = run.groups[kind], lambda: run.note(_SENT)
        self._same_batches = SameBatches(group.members, group.group, "a step with `@smp.step`", tell)
        name_layers(module)
        module._apply(self._prepared)
        self._start(config)
        run.models.append(self)

    def _start(self, config: SMPConfig, optimizers: Sequence[Optimizer] = ()) -> None:
        run = current_run()
        self._engine = Engine(config, report=run.report, device=run.device)
        self._engine.saved.note = run.note
        self._engine.saved.scaled = lambda: [each for each in run.optimizers if each.model is self]
        self._engine.attach(self.module, optimizers, is_placed=False)

    @staticmethod
    def _prepared(tensor: Tensor) -> Tensor:
        """A parameter or buffer on the device, in float32 if it is the master of half precision."""
        run = current_run()
        if (run.config.fp16 or run.config.bf16) and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        # Meta tensors get their values later, on their own stage.
        return tensor if tensor.is_meta else tensor.to(run.device)

    @property
    def engine(self) -> Engine:
        """The engine that runs the module."""
        return self._engine

    # Calls

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: in a step, or outside of it without gradients, which is a step of its own."""
        if losses_of_microbatch() is not None:
            return self.module(*args, **kwargs)
        if torch.is_grad_enabled() and any(each.requires_grad for each in self.module.parameters()):
            raise UnsupportedError(_OUTSIDE)
        if not self._engine.is_spread:
            return self.module(*args, **kwargs)
        step = self._engine.eval_step(
            lambda _: self.module(*args, **kwargs), None, kind="outside", is_joint=True, inputs=(args, kwargs)
        )
        return step.outputs[0]

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """In a step: run backward from ``tensors``, as ``torch.autograd.backward`` does.

        It runs when the schedule says so, at the end of the step at the latest.

        Args:
            tensors: the loss, or several tensors.
            grad_tensors: gradients of tensors with several elements.
        """
        losses = losses_of_microbatch()
        if losses is None:
            raise UnsupportedError("`model.backward` is called outside of a function with `@smp.step`. Call it inside.")
        losses.add(tensors, grad_tensors)

    def run_step(self, function: Callable[..., Any], inputs: StepInputs) -> Any:
        """Run ``function`` with each microbatch. Collective."""
        if not self._engine.is_attached:
            self._engine.attach(self.module, self._engine.optimizers)
        inputs.batch = self._same_batches.of(inputs.batch)
        is_first = self._engine.partition is None
        number, trains = self._kind_of(function, inputs)
        was_announced = is_first and self._engine.partition is not None
        if was_announced:
            self._after_partition()
        if trains:
            outputs, sizes = self._train(function, inputs)
        else:
            step = _sendable(note_losses(function, inputs, may_note=False))
            # What a step returns are lists over its microbatches.
            kind = f"evaluation {number}"
            result = self._engine.eval_step(step, inputs.batch, kind=kind, as_in_training=True)
            outputs, sizes = result.outputs, result.sizes
        if is_first and not was_announced:
            self._after_partition()
        for hook in list(self._post_step.values()):
            hook(self, self._optimizer)
        results, sizes = own_outputs([output.result for output in outputs], sizes, inputs.batch, self._engine)
        return over_microbatches(results, sizes)

    def _kind_of(self, function: Callable[..., Any], inputs: StepInputs) -> tuple[int, bool]:
        """Number of the kind of a step, and whether it runs backward; found by a dry run. Collective."""
        with_gradients = torch.is_grad_enabled()
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        key = (function, with_gradients, self.module.training, trained, inputs.described())
        if key in self._kinds and self._engine.partition is not None:
            return self._kinds[key]
        trains = with_gradients and trained
        if trains or (self._post_partition and self._engine.partition is None):
            found: list[bool] = []
            step = _sendable(note_losses(function, inputs, may_note=True))

            def looked_at(microbatch: Any) -> StepValue:
                value = step(microbatch)
                found.append(value.loss is not None and value.loss.requires_grad)
                return value

            for _ in range(2):  # the first one may skip the dry run, for instance if the partition is given
                if not found:
                    self._engine.look(looked_at, inputs.batch, loss_of=_loss_of)
            # A function that reads values cannot run dry.
            trains = trains and (found[-1] if found else True)
        return self._kinds.setdefault(key, (len(self._kinds), trains))

    def _train(self, function: Callable[..., Any], inputs: StepInputs) -> tuple[Sequence[StepValue], Sequence[int]]:
        optimizer = self._optimizer
        factor = 1.0 if optimizer is None else optimizer.scale_of_backward()
        self._num_passes += 1
        reduces = self._num_passes % self._passes == 0
        is_known = self._engine.partition is not None
        parameters = self._engine.local_model.holdings.parameters if is_known else list(self.module.parameters())
        result = self._engine.train_step(
            _sendable(note_losses(function, inputs, may_note=True)),
            inputs.batch,
            loss_of=_loss_of,
            factor=factor,
            continues=has_gradients(parameters),
            reduces=reduces and self._overlaps,
            sums=not self._averages,
        )
        if result.loss is not None:
            result.commit(result.loss.new_tensor(factor), reduce=reduces)
        return result.outputs, result.sizes

    @property
    def _optimizer(self) -> Any:
        """The latest optimizer of this model, wrapped."""
        own = [each for each in current_run().optimizers if each.model is self]
        return own[-1] if own else None

    # Partition

    @property
    def partitioned(self) -> bool:
        """Whether the model is partitioned, which the first step does."""
        return self._engine.partition is not None

    def _after_partition(self) -> None:
        run = current_run()
        if self._engine.is_spread and not self._was_told:
            self._was_told = True
            run.note(
                "After training `model.module` has only this rank's part of the values. To save all of them call, on "
                "all ranks, `smp.save_checkpoint(path, tag, partial=False)`, `model.state_dict()`, or `model.cpu()`, "
                "after which `model.module` is whole on every rank."
            )
        for hook in list(self._post_partition.values()):
            hook(self, self._optimizer)

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` when the model is partitioned, before its first forward."""
        return _added(self._post_partition, hook)

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after each step."""
        return _added(self._post_step, hook)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Take over a communication hook of PyTorch's DistributedDataParallel, before the first step.

        Raises:
            UnsupportedError: a hook of the user's own, or after the first step.
        """
        config = options_for(hook, self._engine.config)
        if self.partitioned:
            raise UnsupportedError("`register_comm_hook` is called after the first step. Call it before.")
        if config != self._engine.config:
            optimizers = self._engine.optimizers
            self._engine.detach()
            self._engine.close()
            self._start(config, optimizers)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context of a loop over batches, of which all replicas must have the same number.

        A replica that has fewer is an error on all ranks, and no hang.
        """
        if current_run().shape.dp > 1:
            current_run().note(
                "`model.join()` has no effect: all replicas need the same number of batches (DistributedSampler pads)."
            )
        yield

    # Values

    def get_module(self) -> nn.Module:
        """The module."""
        return self.module

    def state_dict(self, gather_to_rank0: bool = False) -> "OrderedDict[str, Any]":  # type: ignore[override]
        """State dict of the whole module. Collective over the ranks of a replica; if it is sharded, over all.

        Args:
            gather_to_rank0: only the first of these ranks gets it, the others an empty dict.
        """
        return full_model_state(self, on_first_only=gather_to_rank0)

    def local_state_dict(self) -> dict[str, Any]:
        """State dict of this rank's part, with a key ``_smp_is_partial``."""
        return local_model_state(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> None:
        """Load a state dict of the whole module, or this rank's part of one. The latter is collective.

        Args:
            state_dict: of :meth:`state_dict`, of the plain module, or of :meth:`local_state_dict`.
            strict: whether names must match.
            same_partition_load: accepted; each rank takes its part in any case.
        """
        load_model_state(self, state_dict, strict=strict)

    def cpu(self) -> "DistributedModel":
        """Make the module whole on every rank, on the host. Collective. The next step partitions it as before."""
        self._engine.restore_everywhere()
        self._engine.detach()
        self.module.cpu()
        return self

    def leave(self) -> None:
        """End the wrapper. A module that is spread stays so, until it is wrapped again."""
        self._engine.detach(restores=False)  # takes no memory
        if not leave_spread(self.module, self._engine):
            self._engine.close()

    def close(self) -> None:
        """End the engine at the end of the process."""
        self._engine.close()


def _added(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _sendable(step: Callable[[Any], StepValue]) -> Callable[[Any], StepValue]:
    """``step``, whose result has placeholders for objects that cannot be sent to all ranks."""

    def run(microbatch: Any) -> StepValue:
        value = step(microbatch)
        return StepValue(pack(value.result).result, value.loss)

    return run


def _loss_of(value: StepValue) -> Tensor | None:
    return value.loss


def _has_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def options_for(hook: Callable[..., Any], config: SMPConfig) -> SMPConfig:
    """``config`` with what ``hook`` does: one of PyTorch's, or :func:`hierarchical_allreduce_hook`."""
    if hook is default_hooks.allreduce_hook:
        return config
    if hook is default_hooks.fp16_compress_hook:
        return dataclasses.replace(config, reduce_dtype="float16")
    if hook is default_hooks.bf16_compress_hook:
        return dataclasses.replace(config, reduce_dtype="bfloat16")
    if hook is hierarchical_allreduce_hook:
        return dataclasses.replace(config, ddp_reduction="hierarchical")
    name = getattr(hook, "__name__", type(hook).__name__)
    raise UnsupportedError(
        f"`register_comm_hook` got `{name}`, but gradients are summed over stages and shards as well, in buckets "
        "that a hook of DistributedDataParallel does not know. Use `allreduce_hook`, `fp16_compress_hook` or "
        "`bf16_compress_hook` of PyTorch, or change gradients between the step and `optimizer.step()`."
    )
