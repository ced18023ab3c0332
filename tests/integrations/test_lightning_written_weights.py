"""Steps that write to weights: a teacher that follows its student, and what dry runs leave of that."""

import pytest
import torch
from lightning_toy import error_of, on_ranks, quiet, shared_loader, toy_module, toy_trainer
from torch import nn

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


def train(folder, smp, follow, accumulates=1):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        loss = self.loss(batch) + (self.net(batch[0]) - wanted).square().mean()
        follow(self.teacher, self.net)
        return loss

    module = toy_module(training_step=training_step)
    torch.manual_seed(1)
    # Other values than the student's: an update too many would change nothing else.
    module.teacher = nn.Sequential(
        *(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        *(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)),
    ).requires_grad_(requires_grad=False)
    options = {"max_epochs": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = toy_trainer(folder, smp=smp, accumulate_grad_batches=accumulates, **options)
    trainer.fit(module, shared_loader(trainer, smp, batch_size=8 // accumulates))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("follow", [in_place, by_data, exchanged])
def test_a_teacher_follows_its_student_once_per_microbatch(tmp_path, follow):
    with quiet():
        (expected,) = on_ranks(train, 1, tmp_path, None, follow)
        (in_halves,) = on_ranks(train, 1, tmp_path, None, follow, 2)
    for layout, smp in LAYOUTS.items():
        for found in on_ranks(train, 2, tmp_path, smp, follow):
            torch.testing.assert_close(
                found,
                in_halves if layout == "pp2" else expected,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, layout=layout: f"{layout}: {text}",
            )


def refused(folder, smp):
    return error_of(lambda: train(folder, smp, in_place))


def test_without_a_dry_run_weights_of_other_stages_cannot_be_written_to(tmp_path):
    for found in on_ranks(refused, 2, tmp_path, {**LAYOUTS["pp2"], "skip_tracing": True}):
        assert "_` needs the values of `" in found
        assert "in a step (without `skip_tracing`)" in found
