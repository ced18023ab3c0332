"""A convolution net on handwritten digits, as scripts for SageMaker's model parallel library train MNIST.

``torchrun --nproc-per-node 2 examples/sagemaker_digits.py --partitions 2 --microbatches 4``
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import smp_strategy.smp as smp

__all__ = ["Net", "datasets", "main"]

NUM_TRAIN = 1536


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logarithms of the probabilities of the ten digits."""
        hidden = F.relu(self.conv1(images))
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return F.log_softmax(self.fc2(hidden), dim=1)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Images for training and for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    first, rest = slice(None, NUM_TRAIN), slice(NUM_TRAIN, None)
    return TensorDataset(images[first], labels[first]), TensorDataset(images[rest], labels[rest])


@smp.step
def train_step(model: smp.DistributedModel, data: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward of a microbatch."""
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model: smp.DistributedModel, data: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and number of digits that are recognised."""
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum")
    return loss, output.argmax(dim=1).eq(target).sum()


def train(model: Any, loader: DataLoader[Any], optimizer: Any, epoch: int) -> None:
    """One epoch."""
    model.train()
    for number, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        _, loss = train_step(model, data, target)
        optimizer.step()
        if smp.rank() == 0 and number % 4 == 0:
            print(f"epoch {epoch} batch {number} loss {loss.reduce_mean().item():.7f}", flush=True)


def test(model: Any, loader: DataLoader[Any]) -> None:
    """Print the loss and the accuracy of the test."""
    model.eval()
    total, correct, number = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            losses, found = test_step(model, data, target)
            total += losses.reduce_sum().item()
            correct += int(found.reduce_sum())
            number += len(target)
    if smp.rank() == 0:
        print(f"test loss {total / number:.7f} accuracy {correct / number:.4f}", flush=True)


def main() -> None:
    """Train, test, and save all weights as one file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model-dir", type=Path, default=Path(os.environ.get("SM_MODEL_DIR", ".")))
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "pipeline": "interleaved", "ddp": True})
    torch.manual_seed(args.seed)
    trained, tested = datasets()
    sampler: Any = DistributedSampler(trained, smp.dp_size(), smp.dp_rank(), seed=args.seed)
    loader = DataLoader(trained, args.batch_size // smp.dp_size(), sampler=sampler, drop_last=True)
    test_loader = DataLoader(tested, args.batch_size)

    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters(), lr=args.lr))
    scheduler = StepLR(optimizer.optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    if smp.dp_rank() == 0:
        weights = model.state_dict()
        if smp.mp_rank() == 0:
            smp.save(weights, args.model_dir / "digits.pt", partial=False)
    smp.barrier()


if __name__ == "__main__":
    main()
