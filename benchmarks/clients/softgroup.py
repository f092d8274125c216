"""SoftGroup's backbone on voxels, at the sizes of its configuration for ScanNet; the head needs a compiled operator."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, batched, indoor
from benchmarks.clients.standing_in import module

#: what softgroup.py imports of its package beside its blocks
OPERATORS = (
    "ball_query", "bfs_cluster", "get_mask_iou_on_cluster", "get_mask_iou_on_pred", "get_mask_label",
    "global_avg_pool", "sec_max", "sec_min", "voxelization", "voxelization_idx",
)  # fmt: skip
#: least edge of a scene's shape in voxels, of its configuration
LEAST_EDGE = 128


class Backbone(torch.nn.Module):
    """The layers that SoftGroup's ``forward_backbone`` runs on voxels, in its order."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.input_conv, self.unet, self.output_layer = whole.input_conv, whole.unet, whole.output_layer

    def forward(self, x: torch.Tensor, coords: torch.Tensor, shape: list[int], items: int) -> torch.Tensor:
        spconv = importlib.import_module("spconv.pytorch")
        scene = spconv.SparseConvTensor(x, coords, shape, items)
        found: torch.Tensor = self.output_layer(self.unet(self.input_conv(scene))).features
        return found


def softgroup(setting: Setting, items: int = 1) -> Client:
    """Colour and position of a voxel in, 32 channels out."""
    folder = setting.clients / "softgroup"
    for name in ("softgroup", "softgroup.model"):
        module(name)
    module("softgroup.ops", **dict.fromkeys(OPERATORS))
    module(
        "softgroup.util",
        cuda_cast=lambda function: function,
        force_fp32=lambda **_: lambda function: function,
        rle_decode=None,
        rle_encode=None,
    )
    module("softgroup.model.blocks", folder / "blocks.py")
    made = module("softgroup.model.softgroup", folder / "softgroup.py")
    scenes: list[Any] = []
    for parts in indoor(setting, items):
        coords = batched(parts)
        shape = (coords[:, 1:].amax(0) + 1).clamp(min=LEAST_EDGE).tolist()
        scenes.append((torch.randn(len(coords), 6, device=setting.device), coords, shape))

    def segment(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        found: torch.Tensor = net(*scene, items)
        return found

    return Client(Backbone(made.SoftGroup(semantic_only=True)).to(setting.device), scenes, segment)
