"""Runs under a ``precision=`` of the Trainer, and the one process that they are compared with."""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning_toy import on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch.utils.data import DataLoader, Subset

__all__ = [
    "BATCH",
    "LAYOUTS",
    "NO_HOOKS",
    "PRECISIONS",
    "RESTLESS",
    "STAGES",
    "STEPS",
    "assert_same",
    "by_hand",
    "by_step",
    "fit",
    "in_one",
    "on",
    "precision_of",
    "without_scheduler",
]


STEPS, BATCH = 8, 8
NO_HOOKS = {"on_train_batch_start": LightningModule.on_train_batch_start}
PRECISIONS = ["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
# Float16 overflows under it for the first steps, and later again, because it soon grows.
RESTLESS = {"init_scale": 2.0**23, "growth_interval": 2}


def by_step(self):
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def without_scheduler(self):
    return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)


def precision_of(precision, scaler=None):
    if precision != "16-mixed":
        return {"precision": precision}
    # By its name Lightning replaces it on the CPU: "AMP with fp16 is not supported on CPU".
    return {"plugins": MixedPrecision(precision, "cpu", scaler and torch.amp.GradScaler("cpu", **scaler))}


def fit(folder, smp, precision, scaler=None, epochs=1, checkpoint=None, per_replica=False, overrides=None, **options):
    def train_dataloader(self):
        data = toy_data(STEPS * BATCH)
        if not per_replica or getattr(self.trainer.strategy, "mesh", None) is None:
            return DataLoader(data, batch_size=BATCH // options.get("accumulate_grad_batches", 1))
        readers, reader = self.trainer.strategy.distributed_sampler_kwargs.values()
        size = BATCH // readers
        mine = [index for index in range(len(data)) if index // size % readers == reader]
        return DataLoader(Subset(data, mine), batch_size=size)

    methods = {"configure_optimizers": without_scheduler, **NO_HOOKS, **(overrides or {})}
    module = toy_module(train_dataloader=train_dataloader, **methods)
    trainer = toy_trainer(
        folder,
        smp=smp,
        max_epochs=epochs,
        use_distributed_sampler=False,
        **precision_of(precision, scaler),
        **options,
    )
    trainer.fit(module, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "end.ckpt")
    saved = torch.load(folder / "end.ckpt", weights_only=False)
    return saved, [dict(module.named_parameters())[name].dtype for name in ("net.0.weight", "net.6.bias")]


def in_one(folder, *args, **options):
    with quiet():
        return fit(folder, None, *args, **options)[0]


def fit_with(folder, smp, args, options):
    return fit(folder, smp, *args, **options)


def on(ranks, folder, smp, *args, **options):
    return on_ranks(fit_with, ranks, folder, smp, args, options)[0][0]


def assert_same(found, expected, tolerance=0.0):
    assert found["global_step"] == expected["global_step"]
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)
    of_pytorch = [{**each.get("MixedPrecision", {}), "hysteresis": 1} for each in (found, expected)]
    assert of_pytorch[0] == of_pytorch[1]


SHARDED = {"sharded_data_parallel_degree": 2}
STAGES = {
    "two stages": (2, {"pipeline_parallel_degree": 2}),
    "four stages": (4, {"pipeline_parallel_degree": 4}),
}
LAYOUTS = {
    "replicas": (2, {"pipeline_parallel_degree": 1}),
    "shards": (2, {"pipeline_parallel_degree": 1, **SHARDED}),
    "shards of stages": (4, {"pipeline_parallel_degree": 2, **SHARDED}),
    "state dealt out": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
    "state of stages dealt out": (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
    "split layers": (
        2,
        {
            "pipeline_parallel_degree": 1,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"net.0": "column", "net.2": "row"},
        },
    ),
}


def by_hand(replicas=1, clip=0.1):
    """One process: divided before gradients are clipped, and schedulers pass over skipped steps."""
    module = toy_module()
    [optimizer], [config] = by_step(module)
    scheduler, scaler = config["scheduler"], torch.amp.GradScaler("cpu", **RESTLESS)
    for inputs, targets in DataLoader(toy_data(STEPS * BATCH), batch_size=BATCH):
        optimizer.zero_grad()
        for part in zip(inputs.chunk(replicas), targets.chunk(replicas), strict=True):
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = module.loss(part)
            scaler.scale(loss).backward()
        for parameter in module.parameters():
            parameter.grad.div_(replicas)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
    return module.state_dict(), scheduler.last_epoch, scaler.get_scale()
