"""A network over a scene that does not fit into the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np
import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.kinds import as_device, check_count, check_kind
from sparseconv.streaming.backward import Streamed, parameters_of
from sparseconv.streaming.phases import GRID, Program
from sparseconv.streaming.planning import PIECE
from sparseconv.streaming.recording.sample import leaves_of, number_of_leaf, recorded
from sparseconv.streaming.run import Run, piece_of
from sparseconv.streaming.scene import Scene, as_rows
from sparseconv.streaming.store import Store
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree


def stream(
    net: torch.nn.Module,
    x: Any,
    budget_bytes: int,
    *,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    resume: str | PathLike[str] | None = None,
    out: Any = None,
) -> Any:
    """What ``net(x)`` is, of a scene larger than the device's memory: block by block, each with its surroundings.

    A block goes through the network together with the voxels that its results look at. How far that is, the index
    projections of all layers say. So each row is what it is in the whole, to the bit but for what the guide on
    streaming names.

    Args:
        net: a network of sparse tensors.
        x: a `SparseTensor`, usually in host memory, or a pair (coords (N, 1+D), features (N, C)) of tensors or numpy
            arrays, which may be mapped files.
        budget_bytes: memory on the device that blocks may take, in addition to the network's own.
        batch_size: of a pair; default: the largest item present + 1.
        device: where the network is; default: that of its parameters.
        progress: called as progress(done, total) after each block.
        resume: a folder that keeps finished blocks; a run that was interrupted goes on from them. Results on the
            voxels of x are files in it.
        out: a tensor or an array, such as a mapped file, that takes the rows of the network's one result, which lies on
            the voxels of x.

    Returns:
        What the network returns, in host memory. A `SparseTensor` on the voxels of x keeps their order. For a pair, a
        sparse tensor becomes its features, or (features, coords) where it lives on other voxels.

    Raises:
        ValueError: a network that does something which a block cannot know, named with its place, before anything is
            run; or a budget that is too small for one block, with the least that is enough.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(400, 3), voxel_size=0.1)
    >>> x = SparseTensor(grid, torch.randn(len(grid), 4))
    >>> net = sc.nn.UNet(4, 5, channels=(8, 16)).eval()
    >>> with torch.no_grad():
    ...     y = stream(net, x, budget_bytes=2_000_000)
    ...     torch.equal(y.features, net(x).features)
    True
    """
    check_kind("net", net, torch.nn.Module, "pass the network")
    check_count("budget_bytes", budget_bytes, 1)
    scene = Scene.of(x, batch_size, max(PIECE, piece_of(budget_bytes)))
    first = next(net.parameters(), None)
    where = as_device(device) if device is not None else scene.features.device if first is None else first.device
    recording, returned, counted = recorded(net, scene.like, scene.features.shape[1], scene.features.dtype, where)
    leaves, layout = leaves_of(returned)
    numbers = [number_of_leaf(leaf) for leaf in leaves]
    program = Program(recording.steps, [n for n in numbers if n is not None])
    sample = dict(enumerate(recording.values))
    del recording
    into = None if out is None else checked_out(out, program, scene)
    parameters = parameters_of(program)
    learns = torch.is_grad_enabled() and (scene.features.requires_grad or bool(parameters))
    if learns and (resume is not None or out is not None):
        raise ValueError("resume and out are for inference: call stream within torch.no_grad()")
    store = Store(resume)
    with torch.no_grad():
        run = Run(program, scene, budget_bytes, where, store, progress, sample, into, learns)
        store.identify(run.about(net))
    if learns:
        features: Any = Streamed.apply(run, scene.features, *parameters)
    else:
        with torch.no_grad():
            run.run()
        features = [run.rows_of(number).features for number in program.results]
    found = dict(zip(program.results, features))
    for step, parts in run.followers:
        step.follow(parts)
    with torch.no_grad():
        for buffer, value in counted:
            buffer.copy_(value)
    made = [leaf if n is None else _result(run, leaf, n, found[n]) for leaf, n in zip(leaves, numbers)]
    return pytree.tree_unflatten(made, layout)


def checked_out(out: Any, program: Program, scene: Scene) -> torch.Tensor:
    """The tensor that takes the result. Raises where it cannot."""
    into = as_rows("out", out)
    steps = [program.steps[n] for n in program.results]
    if len(steps) != 1 or steps[0].place != GRID:
        raise ValueError("out takes the rows of one result on the voxels of x, but the network returns something else")
    shape, dtype = (len(scene), *steps[0].channels), steps[0].dtype
    if tuple(into.shape) != shape or into.dtype != dtype:
        raise ValueError(f"out must be {shape} of {dtype}; got {tuple(into.shape)} of {into.dtype}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is an array that cannot be written: open its file with mode 'r+'")
    return into


def _result(run: Run, leaf: Any, number: int, features: torch.Tensor) -> Any:
    """One of the network's results, as the network gives it."""
    step, scene = run.program.steps[number], run.scene
    if not isinstance(leaf, SparseTensor):
        return features
    coords = run.rows_of(number).coords
    if scene.sparse is None:
        return features if coords is None else (features, coords)
    grid = scene.sparse.grid
    if coords is not None:
        place: Any = run.program.steps[step.place or GRID]
        size = [v * float(s) for v, s in zip(scene.like.voxel_size, place.scale)]
        grid = VoxelGrid(coords, scene.like.batch_size, size, scene.like.origin)
        grid.is_placed = scene.like.is_placed
    return SparseTensor(grid, features.to(grid.device))
