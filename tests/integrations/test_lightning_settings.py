"""Ranks that were given different settings are told so, before anything hangs or drifts apart."""

import os

import pytest
import torch
from lightning_toy import error_of, quiet, toy_loader, toy_module, toy_trainer
from test_lightning_launch import run_forked
from torch.utils.data import DataLoader, TensorDataset

from smp_strategy.testing import run_ranks

REPLICAS, STAGES = {"pipeline_parallel_degree": 1}, {"pipeline_parallel_degree": 2, "microbatches": 2}


def rank():
    return int(os.environ.get("LOCAL_RANK", "0"))


def own(values):
    """The value of this rank, in a tree of lists with a value for each rank."""
    if isinstance(values, dict):
        return {name: own(value) for name, value in values.items()}
    return values[rank()] if isinstance(values, list) else values


def fit(folder, smp, options, variables):
    os.environ.update(own(variables))
    trainer = toy_trainer(folder, smp=own(smp), **own(options))
    return error_of(lambda: trainer.fit(toy_module(), toy_loader()))


@pytest.mark.parametrize(
    ("smp", "options", "variables", "said"),
    [
        (REPLICAS, {"gradient_clip_val": [1.0, 0.01]}, {}, "`Trainer(gradient_clip_val)`: 1.0 on rank 0, 0.01 on ra"),
        (STAGES, {"gradient_clip_val": [1.0, None]}, {}, "`Trainer(gradient_clip_val)`: 1.0 on rank 0, None on rank 1"),
        (REPLICAS, {"accumulate_grad_batches": [1, 2]}, {}, "`Trainer(accumulate_grad_batches)`: 1 on rank 0, 2 on ra"),
        (REPLICAS, {"max_steps": [3, 4]}, {}, "`Trainer(max_steps)`: 3 on rank 0, 4 on rank 1"),
        (STAGES, {"precision": ["32-true", "bf16-mixed"]}, {}, "`Trainer(precision)`: '32-true' on rank 0, 'bf16-mi"),
        (REPLICAS, {"limit_train_batches": [1.0, 2]}, {}, "`Trainer(limit_train_batches)`: 1.0 on rank 0, 2 on rank 1"),
        ({**STAGES, "microbatches": [2, 4]}, {}, {}, "`microbatches` of SMPStrategy: 2 on rank 0, 4 on rank 1"),
        ({**STAGES, "fp16": [False, True]}, {}, {}, "`fp16` of SMPStrategy: False on rank 0, True on rank 1"),
        ({"pipeline_parallel_degree": [1, 2]}, {}, {}, "`pipeline_parallel_degree` of SMPStrategy: 1 on rank 0, 2 on"),
        (
            STAGES,
            {},
            {"SMP_PIPELINE": ["1f1b", "zb-v"]},
            "`pipeline` of SMPStrategy: '1f1b' on rank 0, 'zb-v' on",
        ),
        (
            STAGES,
            {},
            {"NVIDIA_TF32_OVERRIDE": ["0", "1"]},
            "environment variable NVIDIA_TF32_OVERRIDE: 0 on rank 0",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_differ_are_named_with_their_values_and_ranks(smp, options, variables, said, tmp_path):
    for message in run_ranks(fit, 2, str(tmp_path), smp, options, variables, timeout=60):
        assert "The ranks of this run were given different settings" in message
        assert said in message


def fit_with_lengths(folder, smp, numbers, options):
    data = TensorDataset(torch.randn(own(numbers), 8), torch.randint(0, 4, (own(numbers),)))
    trainer = toy_trainer(folder, smp=smp, **options)
    with quiet():
        return error_of(lambda: trainer.fit(toy_module(), DataLoader(data, batch_size=8)))


@pytest.mark.parametrize(("smp", "said"), [(REPLICAS, "8 on rank 0, 7 on rank 1"), (STAGES, "16 on rank 0, 14 on")])
def test_data_sets_of_other_lengths_are_told_before_the_first_step(smp, said, tmp_path):
    for message in run_ranks(fit_with_lengths, 2, str(tmp_path), smp, [128, 112], {}, timeout=60):
        assert f"the number of batches of an epoch: {said}" in message


def test_replicas_whose_epochs_are_longer_than_their_training_may_have_other_lengths(tmp_path):
    assert (
        run_ranks(fit_with_lengths, 2, str(tmp_path), REPLICAS, [128, 112], {"max_steps": 3}, timeout=60)
        == ["nothing"] * 2
    )


def change_the_trainer(self, batch, batch_idx):
    if batch_idx == 1:
        self.trainer.gradient_clip_val = own([None, 0.01])


def clip_by_own(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    self.clip_gradients(optimizer, gradient_clip_val=own([1.0, 0.5]), gradient_clip_algorithm="norm")


def fit_changing(folder, overrides):
    trainer = toy_trainer(folder, smp=REPLICAS)
    return error_of(lambda: trainer.fit(toy_module(**overrides), toy_loader()))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"on_train_batch_start": change_the_trainer},
            "`Trainer(gradient_clip_val)` is None on rank 0, 0.01 on rank 1",
        ),
        (
            {"configure_gradient_clipping": clip_by_own},
            "the largest norm of gradients, to which they are clipped is 1.0 on rank 0, 0.5 on rank 1",
        ),
    ],
    ids=["Trainer", "hook"],
)
def test_what_a_rank_changes_between_steps_is_told_at_the_next_update(overrides, said, tmp_path):
    for message in run_ranks(fit_changing, 2, str(tmp_path), overrides, timeout=60):
        assert said in message


def without_the_last(self):
    return torch.optim.SGD(list(self.parameters())[: own([None, -2])], lr=0.1)


@pytest.mark.parametrize("smp", [REPLICAS, {"pipeline_parallel_degree": 2, "microbatches": 2}])
def test_an_optimizer_that_lacks_parameters_on_a_rank_is_told_before_the_first_step(smp, tmp_path):
    def fit():
        trainer = toy_trainer(str(tmp_path), smp=smp)
        return error_of(lambda: trainer.fit(toy_module(configure_optimizers=without_the_last), toy_loader()))

    for message in run_ranks(fit, 2, timeout=60):
        assert "optimizer 0: SGD of [8] parameters on rank 0, SGD of [6] parameters on rank 1" in message


OTHER_DEVICES = """
    import os
    from smp_strategy import SMPStrategy
    from toy_training import train
    train("out", strategy=SMPStrategy(microbatches=2), devices=2 if os.environ.get("LOCAL_RANK", "0") == "0" else 3)
"""
LEAVES = """
    import os
    from smp_strategy import SMPStrategy
    from toy_training import train
    if os.environ.get("LOCAL_RANK", "0") == "1":
        raise SystemExit(0)
    train("out", strategy=SMPStrategy(microbatches=2), devices=2)
"""
FAILS_LATE = """
    import os
    import lightning
    from lightning_toy import toy_loader, toy_module
    from smp_strategy import SMPStrategy
    def fail(self=None, **given):
        if os.environ.get("LOCAL_RANK", "0") == "1":
            raise ValueError("a mistake at the end")
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    strategy = SMPStrategy(microbatches=2)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, max_steps=2, strategy=strategy, **quiet)
    trainer.fit(toy_module({overrides}), toy_loader())
    {after}
"""


def test_another_number_of_devices_on_a_rank_is_told_before_the_group_is_made(tmp_path):
    code, output, seconds = run_forked(tmp_path, OTHER_DEVICES)
    assert code == 1
    assert "the number of ranks: 2 on rank 0, 3 on rank 1" in output
    assert "`Trainer(devices)`: 2 on rank 0, 3 on rank 1" in output
    assert seconds < 40


def test_a_rank_that_ends_well_before_the_run_ends_the_others(tmp_path):
    code, output, seconds = run_forked(tmp_path, LEAVES)
    assert code == 1
    assert "Rank 1 has ended with exit code 0, but the others wait for it to begin the run" in output
    assert seconds < 40


@pytest.mark.parametrize(
    ("overrides", "after"),
    [("teardown=fail", ""), ("", "fail()")],
    ids=["in teardown", "after the run"],
)
def test_a_rank_that_fails_at_the_end_leaves_no_exit_code_of_zero(overrides, after, tmp_path):
    code, output, _ = run_forked(tmp_path, FAILS_LATE.format(overrides=overrides, after=after))
    assert code == 1
    assert "ValueError: a mistake at the end" in output
