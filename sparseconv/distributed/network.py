"""A network whose parameters every rank holds alike, run over one scene in shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparseconv.distributed.exchange import replicated
from sparseconv.distributed.grid import group_of


class Sharded(torch.nn.Module):
    """Run any module on sharded tensors: the gradient of each parameter is summed over the ranks.

    A plan sums the gradients of its own weights; this does so for all parameters of a network (linear layers, norms),
    and for each of them once. Losses should be sums over voxels divided by global counts, so that their sum over
    ranks is the loss of the scene. Data parallelism over another dimension of the mesh wraps this module as any other.

    Args:
        module: the network, equal on all ranks; rank 0's parameters and buffers are sent to the others here.
        mesh: the one dimension of a mesh, or the group, whose ranks share a scene; default: the world.

    >>> from sparseconv import SparseTensor
    >>> from sparseconv.distributed import shard
    >>> from sparseconv.nn import SubmanifoldConv
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> x = SparseTensor(shard(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]])), torch.ones(2, 4))
    >>> Sharded(SubmanifoldConv(4, 8, 3))(x).channels
    8
    >>> dist.destroy_process_group()
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self._group = group_of(mesh)
        first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, first, group=self._group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; every rank calls it."""
        shared = {name: replicated(p, self._group) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, shared, args, kwargs)
