"""Train inside of Ray Train's ``TorchTrainer``, with Lightning or with Accelerate.

    python examples/cluster/ray_train.py                       Lightning, two stages on two workers of this machine
    python examples/cluster/ray_train.py --door accelerate
    python examples/cluster/ray_train.py --fail-in-epoch 1     a worker dies once; Ray starts all of them again

Ray starts the workers, gives them their ranks and makes the process group. Each epoch is reported to Ray with a
checkpoint, from which all workers continue after a failure (``FailureConfig``). ``pip install '.[ray]'`` installs Ray.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import Callback
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from smp_strategy import SMPStrategy

__all__ = ["main", "run"]

CHECKPOINT = "checkpoint.ckpt"


def run(options: dict[str, Any], storage: Path) -> train.Result:
    """Train on workers of Ray.

    Args:
        options: Those of the command line.
        storage: Folder that all workers reach, for the checkpoints.
    """
    trainer = TorchTrainer(
        with_accelerate if options["door"] == "accelerate" else with_lightning,
        train_loop_config={**options, "storage": str(storage), "struck": str(storage / "struck")},
        scaling_config=ScalingConfig(num_workers=options["workers"], use_gpu=False),
        run_config=RunConfig(name="smp", storage_path=str(storage), failure_config=FailureConfig(max_failures=1)),
    )
    return trainer.fit()


# --- on each worker ---------------------------------------------------------------------------------------------------


class Sorter(L.LightningModule):
    """Learns to sort 16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, numbers: Tensor) -> Tensor:
        x = numbers
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - numbers.sort().values).square().mean()

    def training_step(self, numbers: Tensor, batch_idx: int) -> Tensor:
        loss = self(numbers)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Samples(Dataset[Tensor]):
    """Rows of numbers; all workers have the same."""

    def __init__(self) -> None:
        self._rows = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


def data() -> DataLoader[Tensor]:
    """The samples in batches."""
    return DataLoader(Samples(), batch_size=32)


def with_lightning(options: dict[str, Any]) -> None:
    """An ordinary script, with Ray's environment and a callback that reports."""
    torch.manual_seed(0)
    last = train.get_checkpoint()
    trainer = L.Trainer(
        strategy=SMPStrategy(pipeline_parallel_degree=options["workers"]),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        devices="auto",
        max_epochs=options["epochs"],
        callbacks=[Reports(options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if last is None:
        trainer.fit(Sorter(), data())
        return
    with last.as_directory() as folder:
        trainer.fit(Sorter(), data(), ckpt_path=f"{folder}/{CHECKPOINT}")


class Reports(Callback):
    """Reports the loss and a checkpoint of each epoch to Ray."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fail_once(self.options, trainer.current_epoch)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(f"{folder}/{CHECKPOINT}")  # on all workers; the file is on rank 0
            report(folder, trainer.current_epoch, trainer.callback_metrics["loss_epoch"].item())


def with_accelerate(options: dict[str, Any]) -> None:
    """An ordinary loop with ``save_state`` and ``load_state``."""
    torch.manual_seed(0)
    os.environ.update(ACCELERATE_USE_SMP="true", SMP_PIPELINE_PARALLEL_DEGREE=str(options["workers"]))
    accelerator = Accelerator(cpu=True)
    module = Sorter()
    model, optimizer, loader = accelerator.prepare(module, module.configure_optimizers(), data())
    begin, last = 0, train.get_checkpoint()
    if last is not None:
        with last.as_directory() as folder:
            accelerator.load_state(folder)
            begin = json.loads(Path(folder, "epoch.json").read_text()) + 1
    for epoch in range(begin, options["epochs"]):
        losses = []
        for numbers in loader:
            loss = model(numbers)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        fail_once(options, epoch)
        # Each worker writes its random state, so all of them get the same folder; Ray takes a copy of it.
        folder = Path(options["storage"], "state")
        accelerator.save_state(str(folder))
        if train.get_context().get_world_rank() == 0:
            (folder / "epoch.json").write_text(json.dumps(epoch))
        report(str(folder), epoch, sum(losses) / len(losses))


def report(folder: str, epoch: int, loss: float) -> None:
    """Tell Ray, on all workers; the checkpoint is that of rank 0."""
    is_first = train.get_context().get_world_rank() == 0
    train.report({"epoch": epoch, "loss": loss}, checkpoint=Checkpoint.from_directory(folder) if is_first else None)


def fail_once(options: dict[str, Any], epoch: int) -> None:
    """End the last worker, as a lost machine would."""
    is_last = train.get_context().get_world_rank() == options["workers"] - 1
    if is_last and epoch == options["fail_in_epoch"] and not Path(options["struck"]).exists():
        train.get_all_reported_checkpoints()  # waits until Ray has them: the workers go on from the last one
        Path(options["struck"]).touch()
        os._exit(1)


def main() -> None:
    """Train, and print the last report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=["lightning", "accelerate"], default="lightning")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--fail-in-epoch", type=int)
    parser.add_argument("--storage", type=Path, default=Path("outputs/ray"))
    options = vars(parser.parse_args())
    storage = options.pop("storage").absolute()
    storage.mkdir(parents=True, exist_ok=True)
    result = run(options, storage)
    print(json.dumps(result.metrics | {"checkpoint": str(result.checkpoint.path)}))


if __name__ == "__main__":
    main()
