"""What is saved of split layers, and what is whole again when a run ends; who is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.testing import run_ranks
from tests.ranks.test_tensor_parallel_engine import (
    STEPS,
    Setting,
    Text,
    assert_close,
    batch_of,
    built,
    engine_for,
    one_process,
    train,
)

SHARDED = (("sharded_data_parallel_degree", 2),)
LAYOUTS = {
    "t2": Setting(2),
    "t2 pp2": Setting(2, pp=2),
    "t2 sdp2": Setting(2, dp=2, options=SHARDED),
    "t2 zero1": Setting(2, dp=2, options=(("shard_optimizer_state", True),)),
}


def run_resumed(setting: Setting, state: Any, optimizer_state: Any, when: str) -> Any:
    """From a checkpoint of one process, loaded before or after layers are split, on to one for one process."""
    torch.manual_seed(1)  # other values
    model = Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = engine_for(setting, model, optimizer)
    if when == "after":
        train(engine, model, optimizer, range(1), None)
    engine.saved.load_state_dict(state)
    engine.saved.load_optimizer_state(optimizer, optimizer_state)
    train(engine, model, optimizer, range(STEPS, 2 * STEPS), None)
    return engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_one_process_goes_on_over_split_layers_and_back_in_one_process(name, when):
    setting = LAYOUTS[name]
    model, optimizer = built()
    one_process(setting, range(STEPS), (model, optimizer))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, *_ = run_ranks(run_resumed, setting.ranks, setting, *saved, when)
    *_, state, optimizer_state = one_process(setting, range(STEPS, 2 * STEPS), (model, optimizer))
    assert_close(resumed, (state, optimizer_state))
    again, optimizer = built()
    again.load_state_dict(resumed[0])
    optimizer.load_state_dict(resumed[1])
    one_process(setting, range(2 * STEPS, 2 * STEPS + 1), (again, optimizer))


def run_twice(setting: Setting, where: str) -> Any:
    setting = setting._replace(options=(*setting.options, ("restore_module", where)))
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    train(engine, model, optimizer, range(2), None)
    engine.detach()
    is_whole = type(model.blocks[0].mlp[0]) is nn.Linear
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    has_values = where != "none" and engine.mesh.rank == 0
    between = copy.deepcopy(model.state_dict()) if has_values else {}
    engine.restore_everywhere()
    engine.attach(model, [optimizer])
    train(engine, model, optimizer, range(2, STEPS), None)
    return is_whole, shapes, between, engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)


@pytest.mark.parametrize("where", ["all", "rank_zero", "none"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_run_goes_on_wherever_the_module_was_whole_in_between(name, where):
    setting = LAYOUTS[name]
    ranks = run_ranks(run_twice, setting.ranks, setting, where)
    model, optimizer = built()
    *_, between, _ = one_process(setting, range(2), (model, optimizer))
    between = copy.deepcopy(between)
    *_, state, optimizer_state = one_process(setting, range(2, STEPS), (model, optimizer))
    assert_close(ranks[0][3:], (state, optimizer_state))
    if where != "none":
        assert_close(ranks[0][2], between)
        whole_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert all(shapes == whole_shapes for _, shapes, *_ in (ranks if where == "all" else ranks[:1]))
    assert [is_whole for is_whole, *_ in ranks][0] == (where != "none")


class Rows(torch.optim.Optimizer):
    """Normalises each matrix by its largest element."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad / (parameter.grad.abs().max() + 1e-6)


def run_whole_tensor_optimizer() -> str:
    model, _ = built()
    optimizer = Rows(model.parameters())
    engine = engine_for(Setting(2), model, optimizer)
    with pytest.raises(ConfigError) as caught:
        train(engine, model, optimizer, range(1), None)
    return str(caught.value)


def test_an_optimizer_that_looks_at_whole_matrices_is_refused_with_the_layers_that_are_split():
    for told in run_ranks(run_whole_tensor_optimizer, 2):
        assert "`tensor_parallel_degree` splits layers, and Rows cannot update parts of `blocks.0.mlp.0.weight`" in told
        assert "and 11 other parameters: its steps look at more than one element" in told


class MatricesOnly(torch.optim.SGD):
    """Decays matrices, and no vectors: knows the number of dims."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter *= 0.9
        super().step()


def run_optimizer_that_knows_dims() -> dict[str, Tensor]:
    model, _ = built()
    optimizer = MatricesOnly(model.parameters(), lr=0.1)
    engine = engine_for(Setting(2), model, optimizer)
    train(engine, model, optimizer, range(STEPS), None)
    return engine.saved.full_state_dict()


def test_parts_of_matrices_are_matrices_to_an_optimizer():
    found, _ = run_ranks(run_optimizer_that_knows_dims, 2)
    model, _ = built()
    optimizer = MatricesOnly(model.parameters(), lr=0.1)
    *_, state, _ = one_process(Setting(2), range(STEPS), (model, optimizer))
    assert_close(found, state)


class Penalised(Text):
    """Its loss has a term over all weights, and may read its value."""

    reads = False

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        if self.reads and not loss.item() > 0:
            return loss
        return loss + 1e-3 * sum(parameter.square().sum() for parameter in self.parameters())


def run_penalised(pp: int, options: tuple[tuple[str, Any], ...], evaluates_first: bool, reads: bool = False) -> str:
    torch.manual_seed(0)
    model = Penalised()
    model.reads = reads
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = engine_for(Setting(2, pp=pp, options=options), model, optimizer)
    if evaluates_first:
        engine.eval_step(super(Penalised, model).loss, batch_of(0, 0))
    with pytest.raises((ConfigError, UnsupportedError)) as caught:
        train(engine, model, optimizer, range(1), None)
    return str(caught.value)


@pytest.mark.parametrize("options", [(), (("skip_tracing", True),)], ids=["traced", "not traced"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_that_computes_with_weights_of_split_layers_from_outside_is_refused(pp, options):
    for told in run_ranks(run_penalised, 2 * pp, pp, options, False):
        assert "`blocks.0.mlp.0`, which cannot be split: code of `the step` reads the weight" in told


@pytest.mark.parametrize("reads", [False, True], ids=["", "reads values"])
def test_a_later_kind_of_step_that_does_so_is_refused_too(reads):
    for told in run_ranks(run_penalised, 2, 1, (), True, reads):
        assert "Code above the units computes with `blocks.0.mlp.0.weight` and 11 more" in told
        assert '`tensor_parallel={"blocks.0.mlp.0": "replicate"}`' in told


def run_uneven_evaluation() -> Any:
    """A step that trains, one that evaluates, one that predicts."""
    model, optimizer = built()
    engine = engine_for(Setting(2, pp=2), model, optimizer)
    train(engine, model, optimizer, range(1), None)
    model.eval()
    with torch.no_grad():
        found = engine.eval_step(model.loss, batch_of(5, 0)).outputs
    return [loss.item() for loss in found], engine.inspection.memory_report(), str(engine.inspection.explain())


def test_steps_that_evaluate_are_those_of_one_process():
    ranks = run_ranks(run_uneven_evaluation, 4)
    model, optimizer = built()
    one_process(Setting(2), range(1), (model, optimizer))
    expected = [model.loss(batch_of(5, 0)).item()]
    for losses, *_ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
    reports = {str(report) for _, report, _ in ranks}
    assert all("rank" in report for report in reports)
