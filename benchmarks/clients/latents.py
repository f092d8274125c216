"""Networks of structured latents, until what they draw: TRELLIS' decoder to a mesh, SAM 3D's, and SAM 3D's flow."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, batched, indoor
from benchmarks.clients.standing_in import module, unless_installed
from benchmarks.clients.transformers import kept_in_fp64, varlen


class _Channels:
    """In place of the extraction of a mesh: the features that it reads."""

    feats_channels = 101

    def __init__(self, **_: Any) -> None: ...

    def __call__(self, x: Any, training: bool) -> torch.Tensor:
        found: torch.Tensor = x.feats
        return found


def _scenes(setting: Setting, items: int, voxels: int) -> list[Any]:
    """Parts of coarse voxels of an indoor scan, with latents of 8 channels."""
    scenes: list[Any] = []
    for cells in indoor(setting, items):
        coords = batched([torch.unique(own // 4, dim=0)[:voxels] for own in cells])
        scenes.append((torch.randn(len(coords), 8, device=setting.device), coords))
    return scenes


def _decoding(tensor: Any) -> Callable[[torch.nn.Module, Any], torch.Tensor]:
    def decode(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        vars(net)["dtype"] = scene[0].dtype
        with kept_in_fp64():
            return torch.cat(net(tensor(*scene)))

    return decode


def trellis(setting: Setting, items: int = 1) -> Client:
    """TRELLIS' decoder of latents to a mesh at a third of its width: shifted windows, subdivision."""
    module("flash_attn", flash_attn_varlen_qkvpacked_func=varlen)
    folder = setting.clients / "trellis"
    module("trellis").__path__ = [str(folder / "trellis")]
    module("trellis.representations", MeshExtractResult=None, Gaussian=None, Strivec=None)
    module("trellis.representations.mesh", SparseFeatures2Mesh=_Channels)
    parts = importlib.import_module("trellis.modules.sparse")
    decoder = importlib.import_module("trellis.models.structured_latent_vae.decoder_mesh").SLatMeshDecoder
    made = decoder(64, 256, 8, 4, num_heads=4, representation_config={"use_color": True})
    return Client(made.to(setting.device), _scenes(setting, items, 150), _decoding(parts.SparseTensor))


def _sam3d(setting: Setting) -> str:
    """The package of SAM 3D's networks, with its own choice of torch's attention, and without what renders."""
    unless_installed("loguru", logger=logging.getLogger("sam3d"))
    unless_installed("safetensors")
    unless_installed("safetensors.torch", load_file=None)
    package = "sam3d_objects.model.backbone.tdfy_dit"
    folder = setting.clients / "sam3d"
    for name in ("sam3d_objects", "sam3d_objects.model", "sam3d_objects.model.backbone", package, f"{package}.models"):
        module(name).__path__ = [str(folder / name.replace(".", "/"))]
    module("sam3d_objects.data")
    module("sam3d_objects.data.utils", tree_reduce_unique=None)
    module(f"{package}.representations", MeshExtractResult=None)
    module(f"{package}.representations.mesh", SparseFeatures2Mesh=_Channels)
    latents = f"{package}.models.structured_latent_vae"
    module(latents).__path__ = [str(folder / latents.replace(".", "/"))]
    return package


def sam3d(setting: Setting, items: int = 1) -> Client:
    """SAM 3D's decoder of latents to a mesh at a third of its width."""
    package = _sam3d(setting)
    parts = importlib.import_module(f"{package}.modules.sparse")
    decoder = importlib.import_module(f"{package}.models.structured_latent_vae.decoder_mesh").SLatMeshDecoder
    made = decoder(64, 256, 8, 4, num_heads=4, representation_config={"use_color": True})
    return Client(made.to(setting.device), _scenes(setting, items, 150), _decoding(parts.SparseTensor))


def sam3d_flow(setting: Setting, items: int = 2) -> Client:
    """SAM 3D's flow of latents at a quarter of its width: residual blocks down and up, attention to an image."""
    package = _sam3d(setting)
    parts = importlib.import_module(f"{package}.modules.sparse")
    flow = importlib.import_module(f"{package}.models.structured_latent_flow").SLatFlowModel
    options: dict[str, Any] = {"num_blocks": 4, "num_heads": 4, "io_block_channels": [64], "qk_rms_norm": True}
    made = flow(64, 8, 256, 128, 8, **options)
    image = torch.randn(items, 30, 128, generator=torch.Generator().manual_seed(0))

    def velocity(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        features, coords = scene
        vars(net)["dtype"] = features.dtype
        times = torch.arange(1, items + 1).to(features)
        with kept_in_fp64():
            found: torch.Tensor = net(parts.SparseTensor(features, coords), times, image.to(features)).feats
        return found

    return Client(made.to(setting.device), _scenes(setting, items, 600), velocity)
