"""SageMaker's calls in hooks of Lightning and in scripts with Accelerate, where they know the model by themselves."""

import torch
from accelerate_checks import MICROBATCHES, accelerated_loop, adamw, batches, fresh_accelerator, toy, whole_state
from lightning_toy import on_ranks, toy_loader, toy_module, toy_trainer

import smp_strategy

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 4},
    "sdp2": {"sharded_data_parallel_degree": 2, "prescaled_batch": True},
}


def saving_module(folder, root, stop=None, **options):
    """Saves after each step, with a wrapper of the optimizer; resumes at the beginning, if there is a checkpoint."""

    def on_fit_start(self):
        self.resumed = None
        if (folder / "newest").exists():
            self.resumed = smp_strategy.resume_from_checkpoint(folder, **options)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = self.trainer.global_step
        smp_strategy.save_checkpoint(folder, "whole", partial=False)
        smp_strategy.save_checkpoint(
            folder, f"step_{step}", model=self, optimizer=self.optimizers(), user_content={"step": step}
        )

    return toy_module(root, on_fit_start=on_fit_start, on_train_batch_end=on_train_batch_end)


def fits(folder, smp, steps, root="lightning.pytorch"):
    module = saving_module(folder, root)
    loader = toy_loader(shuffle=False, batch_size=16)
    trainer = toy_trainer(folder / "logs", root, smp=smp, max_epochs=1, limit_train_batches=steps)
    trainer.fit(module, loader)
    kept = trainer.strategy.engine.saved.full_optimizer_state(trainer.optimizers[0])
    found = module.resumed, {name: value.clone() for name, value in module.state_dict().items()}, kept
    smp_strategy.save_checkpoint(folder / "after", "whole", partial=False, model=module)  # which is whole again
    return found


def fits_twice(folder, smp, root="lightning.pytorch"):
    first = fits(folder, smp, 2, root)
    return first, fits(folder, smp, 0, root)


def check(first, second):
    assert first[0] is None
    assert second[0] == {"step": 2}
    for name, value in first[1].items():
        assert torch.equal(second[1][name], value), name
    for number, state in first[2]["state"].items():
        for key, value in state.items():
            assert torch.equal(second[2]["state"][number][key], value), (number, key)


def test_hooks_of_a_lightning_module_save_and_resume(tmp_path):
    for root, name in (("lightning.pytorch", "pp2"), ("pytorch_lightning", "sdp2")):
        folder = tmp_path / name
        first, second = on_ranks(fits_twice, 2, folder, LAYOUTS[name], root)[0]
        check(first, second)
        for written in (folder, folder / "after"):
            weights = torch.load(written / "whole", weights_only=True)
            assert weights.keys() == first[1].keys()
            assert all(torch.equal(weights[name], value) for name, value in first[1].items())


def scripted(folder, smp, model_is_given):
    def run(seed):
        accelerator = fresh_accelerator(smp)
        torch.manual_seed(seed)
        model = toy()
        return accelerator, *accelerator.prepare(model, adamw(model))

    accelerator, model, optimizer = run(0)
    accelerated_loop(accelerator, model, optimizer, batches()[:2])
    given = {"model": model, "optimizer": optimizer} if model_is_given else {}
    smp_strategy.save_checkpoint(folder, "a", user_content=[1], **given)
    accelerated_loop(accelerator, model, optimizer, batches()[2:4])
    expected = whole_state(accelerator)
    accelerator.end_training()

    accelerator, model, optimizer = run(1)
    given = {"model": model, "optimizer": optimizer} if model_is_given else {}
    content = smp_strategy.resume_from_checkpoint(folder, **given)
    accelerated_loop(accelerator, model, optimizer, batches()[2:4])
    return content, expected, whole_state(accelerator)


def test_scripts_with_accelerate_save_and_resume(tmp_path):
    for number, given in enumerate((True, False)):
        smp = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
        content, expected, found = on_ranks(scripted, 2, tmp_path / str(number), smp, given)[0]
        assert content == [1]
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
