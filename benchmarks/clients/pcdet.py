"""OpenPCDet's backbones: VoxelBackBone8x of SECOND, its residual sibling, and VoxelNeXt's."""

from __future__ import annotations

import types
from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, lidar
from benchmarks.clients.standing_in import module

#: an OpenPCDet configuration without entries: the backbones take their defaults, which are the papers' sizes
DEFAULTS = types.SimpleNamespace(get=lambda key, default=None: default)


def _backbone(setting: Setting, file: str, kind: str) -> Any:
    for name in ("pcdet", "pcdet.utils", "pcdet.models", "pcdet.models.backbones_3d"):
        module(name)
    folder = setting.clients / "pcdet"
    module("pcdet.utils.spconv_utils", folder / "spconv_utils.py")
    return getattr(module(f"pcdet.models.backbones_3d.{file}", folder / f"{file}.py"), kind)


def second(setting: Setting, kind: str = "VoxelBackBone8x", items: int = 2) -> Client:
    """A backbone that ends in the dense volume of its bird's-eye view."""
    scenes, size = lidar(setting, 4, items)
    net = _backbone(setting, "spconv_backbone", kind)(DEFAULTS, 4, size)

    def detect(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        batch = {"voxel_features": scene[0], "voxel_coords": scene[1], "batch_size": items}
        dense: torch.Tensor = net(batch)["encoded_spconv_tensor"].dense()
        return dense

    return Client(net.to(setting.device), scenes, detect)


def voxelnext(setting: Setting, items: int = 2) -> Client:
    """The backbone that is sparse to its end: the answer is a two-dimensional sparse tensor."""
    scenes, size = lidar(setting, 5, items)
    net = _backbone(setting, "spconv_backbone_voxelnext", "VoxelResBackBone8xVoxelNeXt")(DEFAULTS, 5, size)

    def detect(net: torch.nn.Module, scene: Any) -> Any:
        batch = {"voxel_features": scene[0], "voxel_coords": scene[1], "batch_size": items}
        return net(batch)["encoded_spconv_tensor"]

    return Client(net.to(setting.device), scenes, detect)
