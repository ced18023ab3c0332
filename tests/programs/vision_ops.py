"""torchvision beside a CPU-only torch: the operator that cannot be loaded there, in Python.

PyPI's torchvision is built for CUDA. Without torch's CUDA libraries its operators do not load, and even its import
fails, and that of timm. Of them, detection models need ``nms``; ``roi_align`` has a version in Python.
"""

import torch
from torch import library

__all__ = ["provide"]


def provide() -> None:
    """Define the operators, if those of torchvision cannot be loaded."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("torchvision::nms", "CPU", _nms)
        from torchvision.ops import boxes

        boxes._assert_has_ops = lambda: None
        # Their versions in Python are compiled at their first call, which takes longer than any test.
        torch._dynamo.config.disable = True


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    from torchvision.ops import box_iou

    kept: list[int] = []
    overlaps = box_iou(dets, dets)
    for index in scores.argsort(descending=True, stable=True).tolist():
        if all(overlaps[index, other] <= iou_threshold for other in kept):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long, device=dets.device)
