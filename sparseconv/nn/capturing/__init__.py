"""Modules whose calls replay CUDA graphs: forward and backward, for scenes of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from sparseconv.geometry.ranges import IndexRange
from sparseconv.nn.captured_inference import CapturedInference
from sparseconv.nn.capturing.capture_module import Module, accelerate, capture_module, explain, release
from sparseconv.nn.capturing.region import register_layers
from sparseconv.nn.module import SparseModule
from sparseconv.tensor import SparseTensor

__all__ = ["accelerate", "capture", "explain", "release"]

register_layers(SparseModule)


@overload
def capture(module: Module) -> Module: ...
@overload
def capture(
    module: torch.nn.Module,
    example: SparseTensor,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> CapturedInference: ...
def capture(
    module: torch.nn.Module,
    example: SparseTensor | None = None,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> Any:
    """Replay a module's calls as CUDA graphs, for scenes of any size. Without a card, calls are the plain calls.

    **Without an example** the module itself is captured, and returned. Two calls of a kind run eagerly and are the
    example. Then a call is one graph, and its gradient another: the host launches two graphs and not a thousand
    kernels. The module stays what it was: its parameters, keys, optimizer, GradScaler, clipping, EMA,
    DistributedDataParallel and hooks on itself know nothing of it.

    A graph begins with the first grid that the call asks for; what the call does before runs eagerly every time. So a
    client of spconv's names may read sizes (``.tolist()``) before it makes its `SparseConvTensor`. What the call
    returns may be sparse tensors on any voxels, tensors, and tuples, lists, dicts and plain objects of them.

    A scene always gets its right result. The device tells the host before results leave whether a scene fitted (rows,
    edges, extent); one that did not runs eagerly, and the next capture has more room. The first replays are compared
    with eager calls. What a graph cannot hold keeps the module eager; `explain` says what and where.

    **With an example** the inference of a network in ``eval()`` is captured at once, maps included, and the result is
    an object to call: it costs the host next to nothing, and never waits for the device. A scene that turns out not to
    fit gives NaN (-1 in integers), and a later call raises the reason.

    Args:
        module: any module whose call takes or makes one sparse tensor. With an example its output is a `SparseTensor`
            on the input's grid, a tensor whose rows are the voxels', a tensor of a size that no scene changes, or a
            tuple, list or dict of these.
        example: a scene as they will come, on the network's device; it gives dtype, batch size and typical sizes.
        room: with an example: rows of every grid over those that it has for the example, at least 1.
        max_voxels: with an example: voxels of the largest scene; default: those of the example times ``room``.
            Rounded up to 256.
        extent: with an example: the box that voxels lie in; default: the example's, grown by an eighth on each side.

    Raises:
        TypeError, ValueError: arguments that do not fit; with an example also a network in training, or a result whose
            number of rows the host cannot know.
        RuntimeError: the example does not fit into ``extent``, or its network does what no graph can hold.

    >>> import torch, sparseconv as sc
    >>> from sparseconv import nn
    >>> net = nn.capture(nn.UNet(4, 3, channels=(8, 16)))
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> net(sc.SparseTensor(grid, torch.randn(len(grid), 4))).channels
    3
    >>> fast = nn.capture(nn.UNet(4, 3, channels=(8, 16)).eval(), sc.SparseTensor(grid, torch.randn(len(grid), 4)))
    >>> logits = fast((grid.coords, torch.randn(len(grid), 4)))  # no grid, which would wait for the device
    >>> logits.shape == (len(grid), 3)
    True
    """
    if example is None and room == 1.25 and max_voxels is None and extent is None:
        return capture_module(module)
    return CapturedInference(module, example, None, 0, room, max_voxels, extent)
