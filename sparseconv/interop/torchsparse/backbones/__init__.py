"""torchsparse's networks."""

from sparseconv.interop.torchsparse.backbones.networks import SparseResNet21D, SparseResUNet42

__all__ = ["SparseResNet21D", "SparseResUNet42"]
