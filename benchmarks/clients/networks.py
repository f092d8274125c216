"""All clients by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.clients.centerpoint import centerpoint
from benchmarks.clients.mmdet3d import mmdet_second, mmdet_unet
from benchmarks.clients.pcdet import second, voxelnext
from benchmarks.clients.pointcept import spunet
from benchmarks.clients.scenes import Client, Setting
from benchmarks.clients.softgroup import softgroup

CLIENTS: dict[str, Callable[[Setting], Client]] = {
    "second": second,
    "second_res": partial(second, kind="VoxelResBackBone8x"),
    "spunet": spunet,
    "voxelnext": voxelnext,
    "centerpoint": centerpoint,
    "mmdet_second": mmdet_second,
    "mmdet_unet": mmdet_unet,
    "softgroup": softgroup,
    "second_b8": partial(second, items=8),
    "spunet_b6": partial(spunet, items=6),
}
#: networks at the size of one or two scans
SMALL = tuple(name for name in CLIENTS if not name.endswith(("_b6", "_b8")))


def make(name: str, setting: Setting) -> Client:
    """A client by its name, from its files: the library that is imported as ``spconv`` makes its layers."""
    torch.manual_seed(0)
    return CLIENTS[name](setting)
