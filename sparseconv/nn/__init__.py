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
from sparseconv.nn.normalization import BatchNorm, LayerNorm
from sparseconv.nn.unet import UNet

__all__ = [
    "ELU",
    "GELU",
    "Add",
    "BatchNorm",
    "Bottleneck",
    "Cat",
    "Conv",
    "ConvBlock",
    "ConvTranspose",
    "Dropout",
    "FeatureModule",
    "InverseConv",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
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
    "Tanh",
    "ToDense",
    "UNet",
]
