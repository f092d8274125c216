"""Pointcept's SpUNet-34C."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, indoor
from benchmarks.clients.standing_in import Registry, module, unless_installed


def _offset_to_batch(offset: torch.Tensor) -> torch.Tensor:
    counts = torch.diff(offset, prepend=offset.new_zeros(1))
    return torch.arange(len(counts), device=offset.device).repeat_interleave(counts)


def spunet(setting: Setting, items: int = 1) -> Client:
    """Six features in, twenty classes out, by voxel."""
    for name in ("pointcept", "pointcept.models"):
        module(name)
    module("pointcept.models.builder", MODELS=Registry())
    module("pointcept.models.utils", offset2batch=_offset_to_batch)
    unless_installed("torch_geometric")
    unless_installed("torch_geometric.utils", scatter=None)
    unless_installed("timm")
    unless_installed("timm.layers", trunc_normal_=torch.nn.init.trunc_normal_)
    made = module("pointcept.models.spunet", setting.clients / "spconv_unet_v1m1_base.py")
    scenes: list[Any] = []
    for parts in indoor(setting, items):
        ends = torch.tensor([len(p) for p in parts], device=setting.device).cumsum(0)
        cells = torch.cat(parts)
        scenes.append((torch.randn(len(cells), 6, device=setting.device), cells, ends))

    def segment(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        logits: torch.Tensor = net({"grid_coord": scene[1], "feat": scene[0], "offset": scene[2]})
        return logits

    return Client(made.SpUNetBase(6, 20).to(setting.device), scenes, segment)
