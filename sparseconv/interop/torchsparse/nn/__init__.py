"""Layers with torchsparse's names."""

from sparseconv.interop.torchsparse.nn import modules as utils
from sparseconv.interop.torchsparse.nn import functional
from sparseconv.interop.torchsparse.nn.modules import (
    BatchNorm, Conv3d, GlobalAvgPool, GlobalMaxPool, GroupNorm, InstanceNorm, LeakyReLU, ReLU, SiLU, SparseCrop,
    ToBEVConvolution, ToBEVHeightCompression, ToBEVReduction, ToDenseBEVConvolution
)  # fmt: skip

__all__ = [
    "BatchNorm", "Conv3d", "GlobalAvgPool", "GlobalMaxPool", "GroupNorm", "InstanceNorm", "LeakyReLU", "ReLU", "SiLU",
    "SparseCrop", "ToBEVConvolution", "ToBEVHeightCompression", "ToBEVReduction", "ToDenseBEVConvolution", "functional",
    "utils",
]  # fmt: skip
