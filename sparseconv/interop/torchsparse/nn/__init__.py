"""Layers with torchsparse's names."""

from sparseconv.interop.torchsparse.nn import functional, utils
from sparseconv.interop.torchsparse.nn.bev import (
    ToBEVConvolution,
    ToBEVHeightCompression,
    ToBEVReduction,
    ToDenseBEVConvolution,
)
from sparseconv.interop.torchsparse.nn.modules import (
    BatchNorm,
    Conv3d,
    GlobalAvgPool,
    GlobalMaxPool,
    GroupNorm,
    InstanceNorm,
    LeakyReLU,
    ReLU,
    SiLU,
    SparseCrop,
)

__all__ = [
    "BatchNorm",
    "Conv3d",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LeakyReLU",
    "ReLU",
    "SiLU",
    "SparseCrop",
    "ToBEVConvolution",
    "ToBEVHeightCompression",
    "ToBEVReduction",
    "ToDenseBEVConvolution",
    "functional",
    "utils",
]
