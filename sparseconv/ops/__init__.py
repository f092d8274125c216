"""Operations over plans and grids that are no convolution."""

from sparseconv.ops.pooling import (
    avg_pool,
    global_avg_pool,
    global_max_pool,
    global_sum_pool,
    max_pool,
    max_unpool,
    sum_pool,
    unpool,
)

__all__ = [
    "avg_pool",
    "global_avg_pool",
    "global_max_pool",
    "global_sum_pool",
    "max_pool",
    "max_unpool",
    "sum_pool",
    "unpool",
]
