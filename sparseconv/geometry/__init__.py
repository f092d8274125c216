"""Grids, projections and the kernel maps between grids."""

from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.projection import IndexProjection
from sparseconv.geometry.ranges import Boundary, IndexRange
from sparseconv.geometry.voxelize import voxelize

__all__ = ["Boundary", "FixedGrid", "IndexProjection", "IndexRange", "KernelMap", "VoxelGrid", "voxelize"]
