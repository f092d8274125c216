"""All clients by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.clients.centerpoint import centerpoint
from benchmarks.clients.mmdet3d import mmdet_second, mmdet_unet
from benchmarks.clients.pcdet import focal, parta2, pillars, second, voxelnext
from benchmarks.clients.pointcept import oacnns, spunet
from benchmarks.clients.scenes import Client, Setting
from benchmarks.clients.softgroup import softgroup
from benchmarks.clients.transformers import transformer

#: Utonia's network, with its way back
M3: dict[str, Any] = {
    "order": ("z", "z-trans", "hilbert", "hilbert-trans"), "enc_depths": (3, 3, 3, 12, 3),
    "enc_channels": (54, 108, 216, 432, 576), "enc_num_head": (3, 6, 12, 24, 32), "enc_patch_size": (1024,) * 5,
    "dec_channels": (54, 108, 216, 432), "dec_num_head": (3, 6, 12, 24), "dec_patch_size": (1024,) * 4,
    "rope_base": 10, "jitter_coords": 1.1, "rescale_coords": 1.2,
}  # fmt: skip
CLIENTS: dict[str, Callable[[Setting], Client]] = {
    "second": second,
    "second_res": partial(second, kind="VoxelResBackBone8x"),
    "spunet": spunet,
    "voxelnext": voxelnext,
    "centerpoint": centerpoint,
    "mmdet_second": mmdet_second,
    "mmdet_unet": mmdet_unet,
    "softgroup": softgroup,
    "focal": focal,
    "parta2": parta2,
    "pillars": partial(pillars, file="spconv_backbone_2d", kind="PillarBackBone8x"),
    "pillars_res": partial(pillars, file="spconv_backbone_2d", kind="PillarRes18BackBone8x"),
    "voxelnext_2d": partial(pillars, file="spconv_backbone_voxelnext2d", kind="VoxelResBackBone8xVoxelNeXt2D"),
    "spunet_m2": partial(spunet, version="m2_bn_momentum"),
    "oacnns": oacnns,
    "ptv3": partial(transformer, kind="m1"),
    "ptv3_m2": partial(transformer, kind="m2"),
    "ptv3_m3": partial(transformer, kind="m3", **M3),
    "litept": partial(transformer, kind="litept"),
    "second_b8": partial(second, items=8),
    "spunet_b6": partial(spunet, items=6),
}
#: networks at the size of one or two scans
SMALL = tuple(name for name in CLIENTS if not name.endswith(("_b6", "_b8")))


def make(name: str, setting: Setting) -> Client:
    """A client by its name, from its files: the library that is imported as ``spconv`` makes its layers."""
    torch.manual_seed(0)
    return CLIENTS[name](setting)
