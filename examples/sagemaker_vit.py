"""A vision transformer on images, as scripts for SageMaker's model parallel library classify images.

``torchrun --nproc-per-node 2 examples/sagemaker_vit.py``
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import smp_strategy.smp as smp

__all__ = ["dataset", "main", "vit"]

NUM_TRAIN = 512
CRITERION = nn.CrossEntropyLoss()
CONFIG = {
    "partitions": 2,
    "microbatches": 4,
    "pipeline": "interleaved",
    "optimize": "speed",
    "placement_strategy": "spread",
    "ddp": True,
}


@smp.step
def train_step(model: smp.DistributedModel, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward of a microbatch."""
    logits = model(pixel_values=pixel_values).logits
    loss = CRITERION(logits, labels)
    model.backward(loss)
    return loss, logits


@smp.step
def test_step(model: smp.DistributedModel, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss, and number of images that are recognised."""
    logits = model(pixel_values=pixel_values).logits
    return CRITERION(logits, labels), (logits.argmax(dim=-1) == labels).sum()


def dataset() -> TensorDataset:
    """Images of 8 x 8 pixels, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images[:NUM_TRAIN], dtype=torch.float32).unsqueeze(1) / 8 - 1
    return TensorDataset(images, torch.tensor(digits.target[:NUM_TRAIN]))


def vit() -> ViTForImageClassification:
    """The model, from random weights."""
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 10
    return ViTForImageClassification(config)


def save_model(module: nn.Module, folder: Path) -> None:
    """Write all weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), folder / "vit.pth")


def main() -> None:
    """Train, test, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model-dir", type=Path, default=Path(os.environ.get("SM_MODEL_DIR", ".")))
    args = parser.parse_args()

    smp.init(CONFIG)
    torch.manual_seed(0)
    model = smp.DistributedModel(vit())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-5))
    data = dataset()
    sampler: Any = DistributedSampler(data, num_replicas=smp.dp_size(), rank=smp.dp_rank())
    loader = DataLoader(data, args.batch_size // smp.dp_size(), sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss, _ = train_step(model, images, labels)
            optimizer.step()
            if smp.rank() == 0:
                print(f"epoch {epoch} batch {number} loss {loss.reduce_mean().item():.7f}", flush=True)
    model.eval()
    with torch.no_grad():
        images, labels = data.tensors
        loss, correct = test_step(model, images, labels)
    if smp.rank() == 0:
        accuracy = int(correct.reduce_sum()) / len(labels)
        print(f"test loss {loss.reduce_mean().item():.7f} accuracy {accuracy:.4f}", flush=True)
    model.cpu()  # on all ranks: makes `model.module` whole
    if smp.rank() == 0:
        save_model(model.module, args.model_dir)
    smp.barrier()


if __name__ == "__main__":
    main()
