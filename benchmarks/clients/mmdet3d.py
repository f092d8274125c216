"""mmdetection3d's middle encoders: SparseEncoder of SECOND, SparseUNet of Part-A2.

SparseEncoder leaves autocast by itself: in fp16 and bf16 its figures are those of fp32 features.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from benchmarks.clients.scenes import Client, Setting, lidar
from benchmarks.clients.standing_in import Registry, conv_layer, module, norm_layer


class _BaseModule(torch.nn.Module):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__()


def _basic_block(build: Any) -> type[torch.nn.Module]:
    """What mmdet's BasicBlock of a ResNet gives to a block that has a forward of its own: two layers with norms."""

    class BasicBlock(torch.nn.Module):
        def __init__(
            self,
            inplanes: int,
            planes: int,
            stride: int = 1,
            downsample: torch.nn.Module | None = None,
            conv_cfg: Any = None,
            norm_cfg: Any = None,
        ) -> None:
            super().__init__()
            self.conv1 = build(conv_cfg, inplanes, planes, 3, stride=stride, padding=1, dilation=1, bias=False)
            self.norm1 = norm_layer(norm_cfg, planes)[1]
            self.conv2 = build(conv_cfg, planes, planes, 3, padding=1, bias=False)
            self.norm2 = norm_layer(norm_cfg, planes)[1]
            self.relu = torch.nn.ReLU(inplace=True)
            self.downsample = downsample

    return BasicBlock


def _load(setting: Setting) -> tuple[Any, Any]:
    """The modules of SparseEncoder and SparseUNet; spconv's layers are registered by mmdetection3d's own file."""
    folder = setting.clients / "mmdet3d"
    layers = Registry()
    build = conv_layer(layers)

    def autocast(enabled: bool) -> Any:
        return torch.autocast(setting.device, enabled=enabled)

    for name in ("mmcv", "mmengine", "mmdet", "mmdet.models", "mmdet.models.backbones", "mmdet3d", "mmdet3d.models"):
        module(name)
    module("mmcv.cnn", build_conv_layer=build, build_norm_layer=norm_layer)
    module("mmcv.ops", points_in_boxes_all=None, three_interpolate=None, three_nn=None)
    module("mmengine.registry", MODELS=layers)
    module("mmengine.model", BaseModule=_BaseModule)
    module("mmengine.runner", amp=types.SimpleNamespace(autocast=autocast))
    module("mmdet.models.losses", sigmoid_focal_loss=None, smooth_l1_loss=None)
    block = _basic_block(build)
    module("mmdet.models.backbones.resnet", BasicBlock=block, Bottleneck=type("Bottleneck", (torch.nn.Module,), {}))
    module("mmdet3d.registry", MODELS=Registry())
    module("mmdet3d.structures", BaseInstance3DBoxes=None)
    module("mmdet3d.utils", OptConfigType=Any)
    package = module("mmdet3d.models.layers")
    overwriting = module("mmdet3d.models.layers.overwrite_spconv", folder / "write_spconv2.py")
    module("mmdet3d.models.layers.spconv", IS_SPCONV2_AVAILABLE=overwriting.register_spconv2())
    blocks = module("mmdet3d.models.layers.sparse_block", folder / "sparse_block.py")
    package.SparseBasicBlock = blocks.SparseBasicBlock
    package.make_sparse_convmodule = blocks.make_sparse_convmodule
    module("mmdet3d.models.middle_encoders")
    encoder, unet = (
        module(f"mmdet3d.models.middle_encoders.{name}", folder / f"{name}.py")
        for name in ("sparse_encoder", "sparse_unet")
    )
    return encoder, unet


def mmdet_second(setting: Setting, items: int = 2) -> Client:
    """SparseEncoder with SECOND's configuration."""
    encoder, _ = _load(setting)
    scenes, size = lidar(setting, 4, items)
    shape = [int(n) for n in size[::-1]]
    shape[0] += 1

    def detect(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        dense: torch.Tensor = net(scene[0], scene[1], items)
        return dense

    return Client(encoder.SparseEncoder(4, shape).to(setting.device), scenes, detect)


def mmdet_unet(setting: Setting, items: int = 2) -> Client:
    """SparseUNet with Part-A2's configuration: features of the bird's-eye view and of each voxel."""
    _, unet = _load(setting)
    scenes, size = lidar(setting, 4, items)
    shape = [int(n) for n in size[::-1]]
    shape[0] += 1

    def detect(net: torch.nn.Module, scene: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = net(scene[0], scene[1], items)
        return found["spatial_features"], found["seg_features"]

    return Client(unet.SparseUNet(4, shape).to(setting.device), scenes, detect)
