"""Calls keep as many bytes for backward as predicted: split layers, shards, half precision, policies."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.ranks.test_tensor_parallel_engine import Text, batch_of

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 parts": (2, {"tensor_parallel_degree": 2, "tensor_parallel": Text.PATTERNS}),
    "2 shards": (2, {"sharded_data_parallel_degree": 2, "sdp_gather": "use"}),
    "2 shards for a step": (2, {"sharded_data_parallel_degree": 2, "sdp_gather": "step"}),
}
ALL = {"activation_checkpointing": "all"}
OFFLOAD = {"offload_activations": True, "offload_min_bytes": 0}


def kept_by_calls(options: dict[str, Any]) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Bytes of each block on this rank, and what was predicted to be on the device and on the host."""
    torch.manual_seed(0)
    model = Text(dropout=0.1)
    engine = Engine(SMPConfig(**{"pipeline_parallel_degree": 1, "microbatches": 2, "pipeline": "1f1b", **options}))
    engine.attach(model, [torch.optim.SGD(model.parameters(), 0.1)])
    found: dict[str, int] = {}
    around = UnitWrapper.around

    def watched(self: Any, call: Any, function: Any) -> Any:
        weights: set[int] = set()

        def inside(*args: Any, **kwargs: Any) -> Any:
            weights.update(map(memory, call.module.parameters()))
            return function(*args, **kwargs)

        run = around(self, call, inside)

        def outside(*args: Any, **kwargs: Any) -> Any:
            kept: dict[int, int] = {}

            def keep(tensor: Tensor) -> Tensor:
                kept[memory(tensor)] = tensor.untyped_storage().nbytes()
                return tensor.detach()  # with its graph it would keep itself alive

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = run(*args, **kwargs)
            if engine._calls.mixed_precision is not None:
                copies = [copy.half for copy in engine._calls.mixed_precision._copies.values() if copy.half is not None]
                weights.update(map(memory, copies))
            if call.name.startswith("blocks") and torch.is_grad_enabled():
                found[call.name] = sum(nbytes for key, nbytes in kept.items() if key not in weights)
            return result

        return outside

    with mock.patch.object(UnitWrapper, "around", watched):
        engine.train_step(model.loss, batch_of(0, 0), loss_of=lambda loss: loss)
    assert engine.partition is not None
    predicted = {
        unit.name: (unit.activation_bytes, unit.relief.offloaded_bytes)
        for unit in engine.partition.units
        if unit.name in found
    }
    engine.close()
    return found, predicted


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("bf16", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_blocks_keep_is_what_was_predicted(layout, bf16):
    world, options = LAYOUTS[layout]
    everything: dict[str, int] = {}
    for kept, predicted in run_ranks(kept_by_calls, world, {**options, "bf16": bf16}):
        assert {name: (nbytes, 0) for name, nbytes in kept.items()} == predicted != {}
        everything |= kept
    for inputs, predicted in run_ranks(kept_by_calls, world, {**options, "bf16": bf16, **ALL}):
        assert {name: (nbytes, 0) for name, nbytes in inputs.items()} == predicted
        assert set(inputs.values()) == {2 * 5 * 16 * (2 if bf16 else 4)}
    for _, predicted in run_ranks(kept_by_calls, world, {**options, "bf16": bf16, **OFFLOAD}):
        # What would have stayed on the device goes out.
        assert predicted == {name: (0, everything[name]) for name in predicted} != {}
