"""One scene over many processes: sharded grids and plans on torch.distributed."""

from sparseconv.distributed.checkpoint import load, save
from sparseconv.distributed.exchange import Exchange, replicated, summed
from sparseconv.distributed.grid import ShardedGrid, shard
from sparseconv.distributed.network import Sharded
from sparseconv.distributed.partition import Partition
from sparseconv.distributed.plan import ShardedConvolutionPlan

__all__ = [
    "Exchange",
    "Partition",
    "Sharded",
    "ShardedConvolutionPlan",
    "ShardedGrid",
    "load",
    "replicated",
    "save",
    "shard",
    "summed",
]
