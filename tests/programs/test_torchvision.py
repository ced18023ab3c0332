"""torchvision: classification and detection as Lightning modules."""

import lightning as L
import pytest
import torch
import torchvision
from program_checks import alone, assert_alike, on_ranks
from torch import nn
from torch.utils.data.distributed import DistributedSampler
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

COUNT, BATCH, CLASSES = 8, 4, 3
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"sharded_data_parallel_degree": 2}


class Classifier(L.LightningModule):
    """A ResNet with frozen statistics: those of a batch depend on the microbatches."""

    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=CLASSES, norm_layer=torchvision.ops.FrozenBatchNorm2d)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.net(images)
        loss = self.loss(scores, labels)
        accuracy = (scores.argmax(-1) == labels).float().mean()
        self.log_dict({"loss": loss, "accuracy": accuracy}, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


def backbone():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()
    )
    net.out_channels = 8
    return net


def detector(kind):
    sizes = {"min_size": 32, "max_size": 32, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    anchors = AnchorGenerator(sizes=((8, 16),), aspect_ratios=((1.0,),))
    if kind == "retinanet":
        return RetinaNet(backbone(), CLASSES, anchor_generator=anchors, **sizes)
    few = {"rpn_batch_size_per_image": 10_000, "box_batch_size_per_image": 10_000, "rpn_pre_nms_top_n_train": 50}
    pool = MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=2)
    head = torchvision.models.detection.faster_rcnn.TwoMLPHead(8 * 9, 16)
    predictor = torchvision.models.detection.faster_rcnn.FastRCNNPredictor(16, CLASSES)
    parts = {"rpn_anchor_generator": anchors, "box_roi_pool": pool, "box_head": head, "box_predictor": predictor}
    if kind == "fasterrcnn":
        return FasterRCNN(backbone(), **parts, **few, **sizes)
    masks = {
        "mask_roi_pool": MultiScaleRoIAlign(["0"], output_size=6, sampling_ratio=2),
        "mask_head": torchvision.models.detection.mask_rcnn.MaskRCNNHeads(8, (8,), 1),
        "mask_predictor": torchvision.models.detection.mask_rcnn.MaskRCNNPredictor(8, 8, CLASSES),
    }
    return MaskRCNN(backbone(), **parts, **masks, **few, **sizes)


class Detector(L.LightningModule):
    """Lists of images and of targets in, a dict of losses out."""

    def __init__(self, kind):
        super().__init__()
        self.model = detector(kind)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        losses = self.model(images, targets)
        self.log_dict(losses, on_step=False, on_epoch=True, batch_size=len(images))
        loss = sum(losses.values())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(images))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Scenes(torch.utils.data.Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 32, 32, generator=generator)
        corner = torch.randint(0, 16, (1 + index % 2, 2), generator=generator).float()
        boxes = torch.cat([corner, corner + 12], dim=1)
        masks = torch.zeros(len(boxes), 32, 32, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        labels = torch.full((len(boxes),), 1 + index % 2, dtype=torch.long)
        return image, {"boxes": boxes, "labels": labels, "masks": masks}


def collate(samples):
    return tuple(map(list, zip(*samples, strict=True)))


def fit(module, loader, smp, folder):
    from smp_strategy import SMPStrategy

    trainer = L.Trainer(
        accelerator="cpu",
        strategy="auto" if smp is None else SMPStrategy(**smp),
        devices=1 if smp is None else 2,
        max_epochs=2,
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return logged, {name: value.detach().clone() for name, value in module.state_dict().items()}


def loader_of(data, smp):
    """In order; Lightning itself would shuffle for several replicas."""
    if smp is None or "sharded_data_parallel_degree" not in smp:
        return torch.utils.data.DataLoader(data, batch_size=BATCH)
    return torch.utils.data.DataLoader(data, batch_size=BATCH // 2, sampler=DistributedSampler(data, shuffle=False))


def classify(folder, smp=None):
    torch.manual_seed(1)
    module = Classifier()
    generator = torch.Generator().manual_seed(2)
    images, labels = torch.randn(COUNT, 3, 32, 32, generator=generator), torch.arange(COUNT) % CLASSES
    data = torch.utils.data.TensorDataset(images, labels)
    return fit(module, loader_of(data, smp), smp, folder)


def detect(folder, kind, smp=None):
    torch.manual_seed(1)
    module = Detector(kind)
    return fit(module, torch.utils.data.DataLoader(Scenes(), batch_size=BATCH, collate_fn=collate), smp, folder)


@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
def test_a_classifier_trains_as_in_one_process(smp, tmp_path):
    expected = alone(classify, tmp_path)
    for logged, weights in on_ranks(classify, 2, tmp_path, {**smp, "restore_module": "all"}):
        assert_alike(logged, expected[0])
        assert_alike(weights, expected[1])


@pytest.mark.parametrize("kind", ["fasterrcnn", "retinanet", "maskrcnn"])
def test_a_detector_trains_as_in_one_process(kind, tmp_path):
    expected = alone(detect, tmp_path, kind)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1, "restore_module": "all"}
    for logged, weights in on_ranks(detect, 2, tmp_path, kind, smp):
        assert_alike(logged, expected[0])
        assert_alike(weights, expected[1])
