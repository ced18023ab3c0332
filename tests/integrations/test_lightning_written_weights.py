"""Steps that write to weights: a teacher that follows its student, and what dry runs leave of that."""

import copy

import pytest
import torch
from lightning_toy import error_of, on_ranks, quiet, shared_loader, toy_module, toy_trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "replicas": {"pipeline_parallel_degree": 1},
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
}


def in_place(teacher, student):
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
            old.mul_(0.8).add_(new, alpha=0.2)


def by_data(teacher, student):
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.data.lerp_(new.data, 0.2)


def exchanged(teacher, student):
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.data = 0.8 * old.data + 0.2 * new.data


def all_at_once(teacher, student):
    with torch.no_grad():
        torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.2)


def averaged(teacher, student):
    teacher.update_parameters(student)


def train(folder, smp, follow, accumulates=1, apart=True, late=""):
    def training_step(self, batch, batch_idx):
        if self.global_step > 2 and late == "first":
            follow(self.teacher, self.net)
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        loss = self.loss(batch) + (self.net(batch[0]) - wanted).square().mean()
        if not late or (self.global_step > 2 and late == "last"):
            follow(self.teacher, self.net)
        return loss

    module = toy_module(training_step=training_step)
    torch.manual_seed(1)
    # Other values than the student's: an update too many would change nothing else.
    module.teacher = nn.Sequential(
        *(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        *(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)),
    ).requires_grad_(requires_grad=False)
    if follow is averaged:  # its copy is not frozen, but no optimizer has it
        module.teacher = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        trained = list(module.net.parameters())
        module.configure_optimizers = lambda: torch.optim.SGD(trained, lr=0.1)
    elif not apart:
        module.teacher = copy.deepcopy(module.net).requires_grad_(requires_grad=False)
    options = {"max_epochs": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = toy_trainer(folder, smp=smp, accumulate_grad_batches=accumulates, **options)
    trainer.fit(module, shared_loader(trainer, smp, batch_size=8 // accumulates))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("follow", [in_place, by_data, exchanged, all_at_once, averaged])
def test_a_teacher_follows_its_student_once_per_microbatch(tmp_path, follow, apart):
    with quiet():
        (expected,) = on_ranks(train, 1, tmp_path, None, follow, 1, apart)
        (in_halves,) = on_ranks(train, 1, tmp_path, None, follow, 2, apart)
    for layout, smp in LAYOUTS.items():
        for found in on_ranks(train, 2, tmp_path, smp, follow, 1, apart):
            torch.testing.assert_close(
                found,
                in_halves if layout == "pp2" else expected,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, layout=layout: f"{layout}: {text}",
            )


def trained_ones_refused(folder):
    def follow(teacher, student):
        in_place(student, teacher)

    return error_of(lambda: train(folder, LAYOUTS["pp2"], follow))


def test_weights_that_the_optimizer_trains_are_not_written_to(tmp_path):
    for found in on_ranks(trained_ones_refused, 2, tmp_path):
        assert "but the optimizer trains them" in found
        assert "net.0.weight" in found


LATE = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 4},
    "whole": {"pipeline_parallel_degree": 2, "microbatches": 1},
    "pp4": {"pipeline_parallel_degree": 4, "microbatches": 4},
    "pp2 dp2": {"pipeline_parallel_degree": 2, "microbatches": 1},
}


@pytest.mark.parametrize("layout", LATE)
@pytest.mark.parametrize("follow", [in_place, by_data, exchanged, all_at_once, averaged])
def test_a_teacher_begins_to_follow_its_student_later(tmp_path, follow, layout):
    smp, ranks = LATE[layout], 4 if "4" in layout or "dp" in layout else 2
    num = smp["microbatches"]
    with quiet():
        (expected,) = on_ranks(train, 1, tmp_path, None, follow, num, late="first")
        (never,) = on_ranks(train, 1, tmp_path, None, follow, num, late="never")
    assert any(not torch.allclose(value, never[name]) for name, value in expected.items() if "teacher" in name)
    for found in on_ranks(train, ranks, tmp_path, smp, follow, late="first"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def late_ones_refused(folder, smp):
    return error_of(lambda: train(folder, smp, in_place, late="last"))


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [("sdp2", "or from the first step of its kind on"), ("pp2", "Write before the first call of the model")],
)
def test_a_teacher_that_cannot_begin_to_follow_later_is_refused_with_the_remedy(tmp_path, layout, remedy):
    assert any(remedy in found for found in on_ranks(late_ones_refused, 2, tmp_path, LAYOUTS[layout]))


def test_without_a_dry_run_weights_of_other_stages_are_written_to_as_well(tmp_path):
    with quiet():
        (expected,) = on_ranks(train, 1, tmp_path, None, in_place, 2)
    for found in on_ranks(train, 2, tmp_path, {**LAYOUTS["pp2"], "skip_tracing": True}, in_place):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
