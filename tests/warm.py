"""Warm up a process that forks ranks.

PyTorch, Lightning and this package do much at their first use: lazy imports, dispatch tables, fake tensors, symbolic
shapes. A forked rank that does it is done with it in a fraction of a second and ends; the next one does it again. So
the process that forks them trains a small model once, alone, and all ranks inherit the result.
"""

import logging
import os
import sys
import tempfile
import warnings
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["warm_up"]


@cache
def warm_up() -> None:
    """Train a small model in this process, once per process; nothing is left behind but what is cached."""
    threads, rng_state, environment = torch.get_num_threads(), torch.get_rng_state(), dict(os.environ)
    logging.disable()  # a test that fails shows what has been logged
    _engine()
    if "lightning.pytorch" in sys.modules:
        _trainer()
    logging.disable(logging.NOTSET)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_rng_state(rng_state)
    torch.set_num_threads(threads)


def _net() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 4))


def _engine() -> None:
    from smp_strategy.config.config import SMPConfig
    from smp_strategy.engine.engine import Engine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    engine = Engine(SMPConfig(microbatches=2))
    engine.attach(net, [optimizer])

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    for _ in range(2):
        result = engine.train_step(loss, (torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)), loss_of=lambda x: x)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        optimizer.step()
    engine.saved.full_state_dict()
    engine.close()
    dist.destroy_process_group()


def _trainer() -> None:
    import lightning.pytorch as pl

    from smp_strategy import SMPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.int64))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            strategy=SMPStrategy(microbatches=2),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
        trainer.save_checkpoint(f"{folder}/end.ckpt")
    if dist.is_initialized():
        dist.destroy_process_group()
