"""Train a model of ``configs/model`` in a layout of ``configs/smp``.

    python examples/train.py                       two processes, two pipeline stages
    python examples/train.py smp=pp4 smp.microbatches=32 batch_size=32
    python examples/train.py smp=single            the reference: one process, plain Lightning
    python examples/train.py -m smp=pp2,pp4        both, one after the other

Lightning starts the other ranks by running this file again, so everything below happens in every process; what is
told to the user is told by rank 0.
"""

import os
import warnings
from pathlib import Path

import hydra
import lightning as L
import torch
from omegaconf import DictConfig

from plot import plot_losses, read_curve
from sampling import sample

__all__ = ["main"]

PROMPT = b"def "


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float:
    """Train, report, and return the last validation loss, so that sweeps can minimise it."""
    os.environ["OMP_NUM_THREADS"] = str(cfg.threads)  # Lightning chooses a number of its own where this is not set
    torch.set_num_threads(cfg.threads)
    quiet()
    L.seed_everything(cfg.seed, verbose=False)
    module: L.LightningModule = hydra.utils.instantiate(cfg.model)
    data: L.LightningDataModule = hydra.utils.instantiate(cfg.data)
    trainer: L.Trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(module, datamodule=data, ckpt_path=cfg.resume)
    if "val_loss" not in trainer.callback_metrics:  # max_steps were over before an epoch was
        trainer.validate(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        report(cfg, trainer)
    return trainer.callback_metrics["val_loss"].item()


def quiet() -> None:
    """Leave out warnings that are about nothing the user could change."""
    for message in (
        "Experiment logs directory .* exists and is not empty",  # Hydra's files are there, as they should be
        "The '.*_dataloader' does not have many workers",  # the text is in memory
        ".*isinstance.treespec, LeafSpec.* is deprecated",  # Lightning 2.6 under torch 2.13
    ):
        warnings.filterwarnings("ignore", message)


def report(cfg: DictConfig, trainer: L.Trainer) -> None:
    """Say how it went, let a language model write a few lines, and say what lies where."""
    folder = Path(cfg.paths.output_dir)
    metrics = folder / "metrics.csv"
    plot_losses(metrics, folder / "loss.png")
    for name in ("train_loss", "val_loss"):
        curve = read_curve(metrics, name)
        print(f"{name:<11} {curve[0][1]:.4f} -> {curve[-1][1]:.4f}")
    checkpoints = folder / "checkpoints"
    checkpoint = next(path for path in (checkpoints / "best.ckpt", checkpoints / "last.ckpt") if path.exists())
    if hasattr(trainer.lightning_module, "context"):
        print(f"\n--- sampled from {checkpoint.name} ---\n{sampled_text(cfg, checkpoint)}\n---")
    print(f"\nwritten to {folder}:")
    for path in (metrics, folder / "loss.png", folder / "partition.json", checkpoint):
        if path.exists():  # smp=single has no partition
            print(f"  {path.relative_to(folder)}")


def sampled_text(cfg: DictConfig, checkpoint: Path) -> str:
    """About 200 bytes from a fresh, ordinary module: the checkpoint holds plain names and shapes, whoever wrote it."""
    module = hydra.utils.instantiate(cfg.model)
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    return sample(module.eval(), prompt=PROMPT, length=200, context=module.context)


if __name__ == "__main__":
    main()
