"""Capture a module, undo it, and say what was captured."""

from __future__ import annotations

from typing import TypeVar

import torch

from sparseconv.nn.capturing.module import Captured

Module = TypeVar("Module", bound=torch.nn.Module)


def capture_module(module: Module) -> Module:
    """Replay this module's calls as CUDA graphs, for scenes of any size. Returns the same module.

    Two calls of a kind run eagerly and are the example. Then a call is one graph, and its gradient another: the host
    launches two graphs and not a thousand kernels. The module stays what it was: its parameters, keys, optimizer,
    GradScaler, clipping, EMA, DistributedDataParallel and hooks on itself know nothing of it. Without a card, calls are
    the plain calls.

    A graph begins with the first grid that the call asks for; what the call does before runs eagerly every time. So a
    client of spconv's names may read sizes (``.tolist()``) before it makes its `SparseConvTensor`. What the call
    returns may be sparse tensors on any voxels, tensors, and tuples, lists and dicts of them.

    A scene always gets its right result. The device tells the host before results leave whether a scene fitted (rows,
    edges, extent); one that did not runs eagerly, and the next capture has more room. The first replays are compared
    with eager calls. What a graph cannot hold keeps the module eager; `explain` says what and where.

    Args:
        module: any module whose call takes or makes one sparse tensor.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> net = nn.capture(nn.UNet(4, 3, channels=(8, 16)))
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> net(sc.SparseTensor(grid, torch.randn(len(grid), 4))).channels
    3
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"capture takes a torch.nn.Module; got {type(module).__name__}")
    if not isinstance(module.__dict__.get("forward"), Captured):
        module.__dict__["forward"] = Captured(module)
    return module


def release(module: Module) -> Module:
    """Undo `capture` for a module and its parts: calls are the plain calls again, and the graphs' memory is free.

    >>> from sparseconv import nn
    >>> release(nn.capture(nn.SubmanifoldConv(4, 8, 3)))
    SubmanifoldConv(4, 8, kernel_size=3)
    """
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), Captured):
            del part.__dict__["forward"]
    return module


def explain(module: torch.nn.Module) -> str:
    """What of a module and its parts is captured, how often that was replayed, the memory that its graphs hold, and why
    other calls were eager.

    >>> explain(torch.nn.ReLU())
    'nothing is captured: see nn.capture'
    """
    found = [part.__dict__["forward"] for part in module.modules() if "forward" in part.__dict__]
    said = [forward.explain() for forward in found if isinstance(forward, Captured)]
    return "\n".join(said) or "nothing is captured: see nn.capture"
