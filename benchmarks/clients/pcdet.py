"""OpenPCDet's backbones: of SECOND, VoxelNeXt, Part-A2, PillarNet and Focals Conv."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.clients.scenes import Client, Setting, lidar
from benchmarks.clients.standing_in import module

#: an OpenPCDet configuration without entries: the backbones take their defaults, which are the papers' sizes
DEFAULTS = types.SimpleNamespace(get=lambda key, default=None: default)
_calls = itertools.count()


def _batch(items: int, **given: torch.Tensor) -> dict[str, Any]:
    """A loader's dict: voxels, and what no backbone reads, which differs from call to call."""
    call = next(_calls)
    names = np.array([f"{call:06d}.{item}" for item in range(items)])
    return {"frame_id": names, "gt_boxes": np.zeros((items, 1 + call % 7, 8)), **given, "batch_size": items}


def _backbone(setting: Setting, file: str, kind: str) -> Any:
    for name in ("pcdet", "pcdet.utils", "pcdet.models", "pcdet.models.backbones_3d"):
        module(name)
    folder = setting.clients / "pcdet"
    module("pcdet.utils.spconv_utils", folder / "spconv_utils.py")
    module("pcdet.utils.common_utils", get_voxel_centers=lambda cells, *_, **__: cells)
    return getattr(module(f"pcdet.models.backbones_3d.{file}", folder / f"{file}.py"), kind)


def second(setting: Setting, kind: str = "VoxelBackBone8x", items: int = 2) -> Client:
    """A backbone that ends in the dense volume of its bird's-eye view."""
    scenes, size = lidar(setting, 4, items)
    net = _backbone(setting, "spconv_backbone", kind)(DEFAULTS, 4, size)

    def detect(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        batch = _batch(items, voxel_features=scene[0], voxel_coords=scene[1])
        dense: torch.Tensor = net(batch)["encoded_spconv_tensor"].dense()
        return dense

    return Client(net.to(setting.device), scenes, detect)


def voxelnext(setting: Setting, items: int = 2) -> Client:
    """The backbone that is sparse to its end: the answer is a two-dimensional sparse tensor."""
    scenes, size = lidar(setting, 5, items)
    net = _backbone(setting, "spconv_backbone_voxelnext", "VoxelResBackBone8xVoxelNeXt")(DEFAULTS, 5, size)

    def detect(net: torch.nn.Module, scene: Any) -> Any:
        batch = _batch(items, voxel_features=scene[0], voxel_coords=scene[1])
        return net(batch)["encoded_spconv_tensor"]

    return Client(net.to(setting.device), scenes, detect)


def parta2(setting: Setting, items: int = 2) -> Client:
    """The U-Net of Part-A2: a bird's-eye view, and features of each voxel."""
    scenes, size = lidar(setting, 4, items)
    _backbone(setting, "spconv_backbone", "VoxelBackBone8x")  # whose blocks it imports
    net = _backbone(setting, "spconv_unet", "UNetV2")(DEFAULTS, 4, size, [0.05, 0.05, 0.1], [0, 0, 0, 1, 1, 1])

    def detect(net: torch.nn.Module, scene: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = net(_batch(items, voxel_features=scene[0], voxel_coords=scene[1]))
        return found["encoded_spconv_tensor"].dense(), found["point_features"]

    return Client(net.to(setting.device), scenes, detect)


def pillars(setting: Setting, file: str, kind: str, items: int = 2) -> Client:
    """A backbone in two axes."""
    scans, size = lidar(setting, 4, items)
    scenes: list[Any] = []
    for _, coords in scans:
        cells = torch.unique(coords[:, [0, 2, 3]], dim=0)
        scenes.append((torch.randn(len(cells), 32, device=setting.device), cells))
    net = _backbone(setting, file, kind)(DEFAULTS, 32, size)

    def detect(net: torch.nn.Module, scene: Any) -> Any:
        found = net(_batch(items, pillar_features=scene[0], pillar_coords=scene[1]))
        levels = found["multi_scale_2d_features"]
        return found.get("encoded_spconv_tensor", (levels["x_conv3"], levels["x_conv5"]))

    return Client(net.to(setting.device), scenes, detect)


def _in_boxes(points: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Points (1, N, 3) -> the last box (1, M, 7) around each, -1 where there is none; headings are left aside."""
    inside = ((points[:, :, None] - boxes[:, None, :, :3]).abs() <= boxes[:, None, :, 3:6] / 2).all(3)
    return torch.where(inside, torch.arange(boxes.shape[1], device=boxes.device), -1).amax(2)


@contextlib.contextmanager
def _numbers_of(x: torch.Tensor) -> Iterator[None]:
    """New tensors get the dtype of x."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(x.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def focal(setting: Setting, items: int = 2) -> Client:
    """The backbone of Focals Conv: voxels are added where the network finds them important, and a loss says where."""
    scenes, size = lidar(setting, 4, items)
    _backbone(setting, "spconv_backbone", "VoxelBackBone8x")
    inner = "pcdet.models.backbones_3d.focal_sparse_conv"
    for name in ("pcdet.ops", "pcdet.ops.roiaware_pool3d", inner, f"{inner}.SemanticSeg"):
        module(name)
    module("pcdet.ops.roiaware_pool3d.roiaware_pool3d_utils", points_in_boxes_gpu=_in_boxes)
    module(f"{inner}.SemanticSeg.pyramid_ffn", PyramidFeat2D=None)
    for name in ("focal_sparse_utils", "focal_sparse_conv"):
        module(f"{inner}.{name}", setting.clients / "pcdet" / "focal_sparse_conv" / f"{name}.py")
    file = setting.clients / "pcdet" / "spconv_backbone_focal.py"
    made = module("pcdet.models.backbones_3d.spconv_backbone_focal", file)
    with contextlib.ExitStack() as stack:
        if setting.device == "cpu":
            stack.enter_context(patch.object(torch.Tensor, "cuda", lambda tensor: tensor))
        net = made.VoxelBackBone8xFocal(DEFAULTS, 4, size)
    boxes = torch.tensor([[0.0, -20, -1, 30, 20, 2, 0, 1], [3, -38, 0, 3, 6, 2, 0, 1]]).expand(items, -1, -1)

    def detect(net: Any, scene: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"voxel_features": scene[0], "voxel_coords": scene[1], "batch_size": items}
        with _numbers_of(scene[0]):
            dense = net({**given, "gt_boxes": boxes.to(scene[0])})["encoded_spconv_tensor"].dense()
        loss = net.forward_ret_dict["loss_box_of_pts"]
        return (dense, loss) if net.training else (dense, dense[:0])

    return Client(net.to(setting.device), scenes, detect)
