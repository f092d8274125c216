"""Operations over plans and grids that are no convolution."""

from sparseconv.ops.global_pooling import global_avg_pool, global_max_pool, global_sum_pool
from sparseconv.ops.interpolation import Interpolation, interpolate, splat
from sparseconv.ops.neighborhood import (
    depthwise_convolution,
    neighborhood_attention,
    neighborhood_logits,
    neighborhood_softmax,
)
from sparseconv.ops.patches import Patches
from sparseconv.ops.points import PointGroups, voxelize_features
from sparseconv.ops.pooling import avg_pool, max_pool, max_unpool, sum_pool, unpool
from sparseconv.ops.serialization import Serialization, serial_codes, serialize

__all__ = [
    "Interpolation",
    "Patches",
    "PointGroups",
    "Serialization",
    "avg_pool",
    "depthwise_convolution",
    "global_avg_pool",
    "global_max_pool",
    "global_sum_pool",
    "interpolate",
    "max_pool",
    "max_unpool",
    "neighborhood_attention",
    "neighborhood_logits",
    "neighborhood_softmax",
    "serial_codes",
    "serialize",
    "splat",
    "sum_pool",
    "unpool",
    "voxelize_features",
]
