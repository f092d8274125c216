"""Pointcept's networks of sparse convolutions: SpUNet-34C, and OA-CNNs."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, indoor_rows
from benchmarks.clients.standing_in import Registry, module, unless_installed


def _offset_to_batch(offset: torch.Tensor) -> torch.Tensor:
    counts = torch.diff(offset, prepend=offset.new_zeros(1))
    return torch.arange(len(counts), device=offset.device).repeat_interleave(counts)


def _scatter(src: torch.Tensor, index: torch.Tensor, dim: int = 0, reduce: str = "sum") -> torch.Tensor:
    """torch_geometric's sum or mean of the rows of each index."""
    found = src.new_zeros(int(index.max()) + 1, *src.shape[1:]).index_add(0, index, src)
    return found if reduce == "sum" else found / torch.bincount(index)[:, None]


def _voxel_grid(pos: torch.Tensor, size: float, batch: torch.Tensor) -> torch.Tensor:
    """torch_geometric's number of the cell that holds a point, batch items apart."""
    cells = torch.cat([((pos - pos.amin(0)) / size).long(), batch[:, None].long()], 1)
    number = cells.new_zeros(len(cells))
    for axis in range(cells.shape[1]):
        number = number * (cells[:, axis].max() + 1) + cells[:, axis]
    return number


def _stand_in() -> None:
    for name in ("pointcept", "pointcept.models"):
        module(name)
    module("pointcept.models.builder", MODELS=Registry())
    module("pointcept.models.utils", offset2batch=_offset_to_batch)
    unless_installed("torch_geometric")
    unless_installed("torch_geometric.utils", scatter=_scatter)
    unless_installed("torch_geometric.nn")
    unless_installed("torch_geometric.nn.pool", voxel_grid=_voxel_grid)
    unless_installed("timm")
    unless_installed("timm.layers", trunc_normal_=torch.nn.init.trunc_normal_)


def _client(setting: Setting, net: torch.nn.Module, items: int) -> Client:
    """A network that takes Pointcept's dictionaries."""

    def segment(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        logits: torch.Tensor = net({"grid_coord": scene[1], "feat": scene[0], "offset": scene[2]})
        return logits

    return Client(net.to(setting.device), indoor_rows(setting, items), segment)


def spunet(setting: Setting, items: int = 1, version: str = "") -> Client:
    """Six features in, twenty classes out, by voxel."""
    _stand_in()
    folder = setting.clients / "pointcept/pointcept/models/sparse_unet"
    file = folder / f"spconv_unet_v1{version}.py" if version else setting.clients / "spconv_unet_v1m1_base.py"
    return _client(setting, module("pointcept.models.spunet", file).SpUNetBase(6, 20), items)


def oacnns(setting: Setting, items: int = 1) -> Client:
    """The same with OA-CNNs."""
    _stand_in()
    module("pointcept.models.oacnns")
    file = setting.clients / "pointcept/pointcept/models/oacnns/oacnns_v1m1_base.py"
    return _client(setting, module("pointcept.models.oacnns.base", file).OACNNs(6, 20), items)
