"""CenterPoint's backbone, SpMiddleResNetFHD of det3d."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, lidar
from benchmarks.clients.standing_in import Registry, module, norm_layer


def centerpoint(setting: Setting, items: int = 2) -> Client:
    """Five features of a voxel, as on nuScenes."""
    for name in ("det3d", "det3d.models", "det3d.models.backbones"):
        module(name)
    module("det3d.models.registry", BACKBONES=Registry())
    module("det3d.models.utils", build_norm_layer=norm_layer)
    made = module("det3d.models.backbones.scn", setting.clients / "centerpoint" / "scn.py")
    scenes, size = lidar(setting, 5, items)

    def detect(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        dense: torch.Tensor = net(scene[0], scene[1], items, size)[0]
        return dense

    return Client(made.SpMiddleResNetFHD(num_input_features=5).to(setting.device), scenes, detect)
