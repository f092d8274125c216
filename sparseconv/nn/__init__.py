"""Modules and networks."""

from sparseconv.nn.blocks import Bottleneck, ConvBlock, ResidualBlock
from sparseconv.nn.captured_step import capture_step
from sparseconv.nn.capturing import accelerate, capture, explain, release
from sparseconv.nn.containers import Add, Cat, Residual, Sequential, ToDense
from sparseconv.nn.convnext import ConvNeXtUNet
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
from sparseconv.nn.minkunet import MinkUNet
from sparseconv.nn.module import FeatureModule, SparseModule
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
from sparseconv.nn.ptv3 import ConditionalPositionalEncoding, PointEmbedding
from sparseconv.nn.resnet import ResNet
from sparseconv.nn.second import SecondEncoder, VoxelResBackBone8x
from sparseconv.nn.spunet import SpUNet
from sparseconv.nn.synchronized import SyncBatchNorm
from sparseconv.nn.unet import UNet

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
    "Dropout",
    "FeatureModule",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GlobalSumPool",
    "GroupNorm",
    "InstanceNorm",
    "InverseConv",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool",
    "MaxUnpool",
    "MinkUNet",
    "PReLU",
    "PointEmbedding",
    "Pointwise",
    "ReLU",
    "ResNet",
    "Residual",
    "ResidualBlock",
    "SecondEncoder",
    "Sequential",
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
    "accelerate",
    "capture",
    "capture_step",
    "explain",
    "release",
]
