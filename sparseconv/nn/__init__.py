"""Modules and networks."""

from typing import TYPE_CHECKING, Any

from sparseconv.nn.accelerated import accelerate, capture, explain, release
from sparseconv.nn.attention.rotary import RotaryPositions
from sparseconv.nn.attention.serialized import RelativePositionBias, SerializedAttention
from sparseconv.nn.attention.windowed import WindowAttention
from sparseconv.nn.blocks import Bottleneck, ConvBlock, ResidualBlock
from sparseconv.nn.captured_step import capture_step
from sparseconv.nn.containers import Add, Cat, Residual, Sequential, ToDense
from sparseconv.nn.convolution import Conv, ConvTranspose, InverseConv, SubmanifoldConv
from sparseconv.nn.features import (
    ELU,
    GELU,
    Dropout,
    LeakyReLU,
    Linear,
    Pointwise,
    PReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
)
from sparseconv.nn.models.convnext import ConvNeXtUNet
from sparseconv.nn.models.minkunet import MinkUNet
from sparseconv.nn.models.ptv3 import (
    ConditionalPositionalEncoding,
    LinearEmbedding,
    PointEmbedding,
    PointTransformerOptions,
    PointTransformerV3,
)
from sparseconv.nn.models.ptv3_parts import (
    DropPath,
    LayerScale,
    PointTransformerBlock,
    SerializedPooling,
    SerializedUnpooling,
)
from sparseconv.nn.models.resnet import ResNet
from sparseconv.nn.models.second import SecondEncoder, VoxelResBackBone8x
from sparseconv.nn.models.spunet import SpUNet
from sparseconv.nn.models.unet import UNet
from sparseconv.nn.module import FeatureModule, SparseModule, pack
from sparseconv.nn.normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from sparseconv.nn.pooling import (
    AvgPool,
    GlobalAvgPool,
    GlobalMaxPool,
    GlobalSumPool,
    MaxPool,
    MaxUnpool,
    SumPool,
    Unpool,
)
from sparseconv.nn.synchronized import SyncBatchNorm
from sparseconv.other_names import module_error

__all__ = [
    "ELU",
    "GELU",
    "Add",
    "AvgPool",
    "BatchNorm",
    "Bottleneck",
    "Cat",
    "ConditionalPositionalEncoding",
    "Conv",
    "ConvBlock",
    "ConvNeXtUNet",
    "ConvTranspose",
    "DropPath",
    "Dropout",
    "FeatureModule",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GlobalSumPool",
    "GroupNorm",
    "InstanceNorm",
    "InverseConv",
    "LayerNorm",
    "LayerScale",
    "LeakyReLU",
    "Linear",
    "LinearEmbedding",
    "MaxPool",
    "MaxUnpool",
    "MinkUNet",
    "PReLU",
    "PointEmbedding",
    "PointTransformerBlock",
    "PointTransformerOptions",
    "PointTransformerV3",
    "Pointwise",
    "ReLU",
    "RelativePositionBias",
    "ResNet",
    "Residual",
    "ResidualBlock",
    "RotaryPositions",
    "SecondEncoder",
    "Sequential",
    "SerializedAttention",
    "SerializedPooling",
    "SerializedUnpooling",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "SpUNet",
    "SparseModule",
    "SubmanifoldConv",
    "SumPool",
    "SyncBatchNorm",
    "Tanh",
    "ToDense",
    "UNet",
    "Unpool",
    "VoxelResBackBone8x",
    "WindowAttention",
    "accelerate",
    "capture",
    "capture_step",
    "explain",
    "pack",
    "release",
]

if not TYPE_CHECKING:  # to whom every name would exist

    def __getattr__(name: str) -> Any:
        raise module_error(name)
