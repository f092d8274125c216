"""Sparse convolution with plan objects: plan once, execute many times.

>>> import torch, sparseconv as sc
>>> grid, point_rows = sc.voxelize(torch.rand(1000, 3), voxel_size=0.1)
>>> plan = sc.ConvolutionPlan(grid, kernel_size=3)
>>> y = plan.execute(torch.randn(len(grid), 16), torch.randn(27, 16, 32))
>>> y.shape == (len(grid), 32)
True
"""

from sparseconv.geometry import Boundary, IndexProjection, IndexRange, KernelMap, VoxelGrid, voxelize
from sparseconv.plan import ConvolutionPlan
from sparseconv.tensor import SparseTensor

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "ConvolutionPlan",
    "IndexProjection",
    "IndexRange",
    "KernelMap",
    "SparseTensor",
    "VoxelGrid",
    "voxelize",
]
