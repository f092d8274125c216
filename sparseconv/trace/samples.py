"""A network's steps, found by running it on two made-up samples that must agree in everything but their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch

from sparseconv.checks import described
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.ops.comparing import same
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree
from sparseconv.trace.program import Call, InputGrid, InputRows, Layer, OverEdges, Step
from sparseconv.trace.record import Layers, Recorded, Recording
from sparseconv.trace.watched import WatchedGrid

#: edges of the two samples' cubes of voxels
EDGES = (4, 5)


def recorded(
    net: torch.nn.Module,
    like: VoxelGrid,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: Layers | None = None,
    purpose: str = "streamed",
) -> tuple[Recording, Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The steps of ``net``, what it returned on the sample, and buffers that it counts in, with what they are then.

    Modules for which ``layers`` holds are one step each. Raises ValueError where the network does something that rows
    alone do not decide, named with its place; ``purpose`` is what it then cannot be.
    """
    pairs = []
    for edge in EDGES:
        with unchanged(net) as counted:
            pairs.append(_run(Recording(net, layers, purpose), net, like, channels, dtype, device, edge))
    first, second = pairs
    _compare(first[0], second[0])
    _compare_results(first, second)
    return *second, counted


@contextmanager
def unchanged(net: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Buffers of a network as they were, whatever a sample does to them; those that it changed, with what they were
    changed to."""
    kept = [(buffer, buffer.clone()) for buffer in net.buffers()] if isinstance(net, torch.nn.Module) else []
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        yield changed
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    changed.append((buffer, buffer.clone()))
                    buffer.copy_(before)


def _run(
    recording: Recording,
    net: Any,
    like: VoxelGrid,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    edge: int,
) -> tuple[Recording, Any]:
    space = torch.cartesian_prod(*(torch.arange(edge) for _ in range(like.rank))).view(-1, like.rank)
    coords = torch.nn.functional.pad(space, (1, 0)).int().to(device)
    generator = torch.Generator().manual_seed(edge)
    features = torch.randn(len(coords), channels, generator=generator).to(device, dtype)
    real = VoxelGrid(coords, like.batch_size, like.voxel_size, like.origin)
    real.is_placed = like.is_placed
    grid = WatchedGrid.of(recording, recording.add(InputGrid(scale=(Fraction(1),) * real.rank), real))
    x = SparseTensor(grid, recording.rows(InputRows(place=grid.number), features))
    try:
        with recording.watching(net):
            return recording, net(x)
    finally:
        recording.ended()


def leaves_of(results: Any) -> tuple[list[Any], Any]:
    """The recorded tensors and sparse tensors of what a network returned, and how they were put together."""
    leaves, layout = pytree.tree_flatten(results, is_leaf=lambda value: isinstance(value, SparseTensor))
    return leaves, layout


def number_of_leaf(leaf: Any) -> int | None:
    """The step of a result; None of what is no tensor of rows or of the scene."""
    value = leaf.features if isinstance(leaf, SparseTensor) else leaf
    return value.number if isinstance(value, Recorded) else None


def _compare(a: Recording, b: Recording) -> None:
    """Raise ValueError where two samples of other rows were treated in other ways."""
    for one, other in zip(a.steps, b.steps):
        if not _alike(one, other):
            raise ValueError(
                f"{one.where} cannot be {a.purpose}: what it does depends on the number of voxels, or uses "
                "rows in a way that cannot be recorded: use modules of sparseconv.nn and torch's row-wise functions"
            )
    if len(a.steps) != len(b.steps):
        raise ValueError(f"this network cannot be {a.purpose}: its operations depend on the number of voxels")


def _compare_results(a: tuple[Recording, Any], b: tuple[Recording, Any]) -> None:
    """Raise ValueError where a network returns something of the samples that no block makes."""
    (some, layout), (others, other_layout) = leaves_of(a[1]), leaves_of(b[1])
    if layout != other_layout:
        b[0].refuse("it returns something else for another number of voxels", "return the same for all scenes")
    for one, other in zip(some, others):
        number = number_of_leaf(other)
        if number is not None and number == number_of_leaf(one):
            if number in b[0].stale:
                b[0].refuse_stale()
        elif isinstance(other, (SparseTensor, VoxelGrid)) or not (one is other or _is_constant(one, other)):
            b[0].refuse(
                f"it returns {described(other)} that may depend on the voxels",
                "return tensors and sparse tensors that are made of its input, and what is always the same",
            )


def _is_constant(a: Any, b: Any) -> bool:
    """Whether two results that no step made are one value."""
    return isinstance(b, (bool, int, float, complex, str, torch.Tensor)) and type(a) is type(b) and same(a, b)


def _alike(a: Step, b: Step) -> bool:
    if type(a) is not type(b) or (a.where, a.place, a.channels, a.dtype) != (b.where, b.place, b.channels, b.dtype):
        return False
    if isinstance(a, InputRows):
        return True
    if isinstance(a, (Call, OverEdges, Layer)) and isinstance(b, (Call, OverEdges, Layer)):
        return same((a.args, a.kwargs), (b.args, b.kwargs))
    return a.uses == b.uses
