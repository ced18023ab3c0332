"""timm: an Accelerate loop with its models, loss, mixing of samples, optimizer, schedule and average of weights."""

from functools import partial

import pytest
import torch
from loops import accelerator as accelerator_of
from loops import whole_weights
from program_checks import LAYOUTS, alone, assert_alike, on_ranks
from timm import create_model
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

STEPS, BATCH, CLASSES = 3, 8, 5
MODELS = {
    "vit": partial(
        create_model,
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=24,
        depth=4,
        num_heads=2,
        num_classes=CLASSES,
    ),
    "convnext": partial(
        create_model,
        "convnext_atto",
        depths=(1, 1, 2, 1),
        dims=(8, 16, 16, 16),
        num_classes=CLASSES,
    ),
    "resnet": partial(create_model, "resnet18", num_classes=CLASSES, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
}


def train(name, smp=None, mixes=False, averages=False):
    accelerator = accelerator_of(smp)
    torch.manual_seed(1)
    model = MODELS[name]()
    average = ModelEmaV3(model, decay=0.9) if averages else None
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.05, weight_decay=0.02)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=1, warmup_lr_init=0.01)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(STEPS * BATCH, 3, 32, 32, generator=generator)[:, :, : 16 if name == "vit" else 32]
    images = images[..., : images.shape[2]]
    labels = torch.randint(0, CLASSES, (len(images),), generator=generator)
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    criterion = SoftTargetCrossEntropy() if mixes else LabelSmoothingCrossEntropy(0.1)
    mixing = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES) if mixes else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for number, (inputs, targets) in enumerate(loader):
        if mixing is not None:
            import numpy

            numpy.random.seed(number)
            inputs, targets = mixing(inputs, targets)
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        schedule.step(number + 1)
        if average is not None:
            update = partial(average.update, model, step=number)
            update() if smp is None else accelerator.smp.with_weights(update)
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    model.eval()
    with torch.no_grad():
        scores = model(images[:BATCH])
    averaged = {key: value.clone() for key, value in average.module.state_dict().items()} if averages else None
    return losses, whole_weights(accelerator, model), scores, averaged


@pytest.mark.parametrize(
    ("name", "layout"),
    [("vit", "pp2"), ("vit", "sdp2"), ("vit", "tp2"), ("convnext", "pp2"), ("convnext", "sdp2")],
)
def test_it_trains_as_in_one_process(name, layout):
    expected = alone(train, name)
    for found in on_ranks(train, 2, name, LAYOUTS[layout]):
        assert_alike(found, expected, floor=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_mixed_samples_and_averaged_weights(name):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1 if name == "resnet" else 2}
    expected = alone(train, name, mixes=True, averages=True)
    for found in on_ranks(train, 2, name, smp, mixes=True, averages=True):
        assert_alike(found, expected, floor=1e-4)
