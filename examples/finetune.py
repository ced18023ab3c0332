"""Fine-tune a pretrained language model in a layout of ``configs/smp``, whole or with LoRA.

    python examples/finetune.py                               a tiny model that the example makes, two pipeline stages
    python examples/finetune.py folder=path/to/a/model        your own, with its tokenizer
    python examples/finetune.py tuning=lora smp=pp2_sdp2      adapters, four processes
    python examples/finetune.py smp=single                    the reference: one process, plain Lightning

A rank never holds more than its share of the model and one unit. The checkpoint that a run writes is an ordinary one;
``smp export`` makes a folder for ``from_pretrained`` of it.
"""

import os
from pathlib import Path

import hydra
import lightning as L
import torch
import transformers
from omegaconf import DictConfig

from plot import plot_losses, read_curve
from train import quiet

__all__ = ["main"]


@hydra.main(version_base="1.3", config_path="../configs", config_name="finetune")
def main(cfg: DictConfig) -> float:
    """Fine-tune, report, and return the last validation loss."""
    os.environ["OMP_NUM_THREADS"] = str(cfg.threads)
    torch.set_num_threads(cfg.threads)
    quiet()
    transformers.utils.logging.disable_progress_bar()
    L.seed_everything(cfg.seed, verbose=False)
    module: L.LightningModule = hydra.utils.instantiate(cfg.model)
    data: L.LightningDataModule = hydra.utils.instantiate(cfg.data)
    trainer: L.Trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(module, datamodule=data, ckpt_path=cfg.resume)
    if "val_loss" not in trainer.callback_metrics:  # max_steps were over before an epoch was
        trainer.validate(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        report(Path(cfg.paths.output_dir))
    return trainer.callback_metrics["val_loss"].item()


def report(folder: Path) -> None:
    """Say how it went, and what lies where."""
    metrics = folder / "metrics.csv"
    plot_losses(metrics, folder / "loss.png")
    for name in ("train_loss", "val_loss"):
        curve = read_curve(metrics, name)
        print(f"{name:<11} {curve[0][1]:.4f} -> {curve[-1][1]:.4f}")
    print(f"\nwritten to {folder}:")
    for path in (metrics, folder / "loss.png", folder / "partition.json", folder / "checkpoints" / "best.ckpt"):
        if path.exists():
            print(f"  {path.relative_to(folder)}")


if __name__ == "__main__":
    main()
