"""Modules and networks."""

from sparseconv.nn.blocks import Bottleneck, ConvBlock, ResidualBlock
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
from sparseconv.nn.unet import UNet

__all__ = [
    "ELU",
    "GELU",
    "Add",
    "AvgPool",
    "BatchNorm",
    "Bottleneck",
    "Cat",
    "Conv",
    "ConvBlock",
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
    "PReLU",
    "Pointwise",
    "ReLU",
    "Residual",
    "ResidualBlock",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "SparseModule",
    "SubmanifoldConv",
    "SumPool",
    "Tanh",
    "ToDense",
    "UNet",
    "Unpool",
]
