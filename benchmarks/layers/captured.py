"""A map that one CUDA graph makes anew: what a step captured by `nn.capture_step` pays for the geometry of a scene."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch

import sparseconv as sc
from sparseconv.bench.check import Neighbours, judge
from sparseconv.bench.implementations import Sparseconv
from sparseconv.bench.measure import Layer
from sparseconv.geometry import fixed_grid
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.fixed_grid_io import put_scene
from sparseconv.gpu import graphs

#: rows of a captured map over the scene's, in the figure and in the one beside it: as few as fit, and nn.capture's own
ROOM, USUAL_ROOM = 1.0, 1.25


def captured_map(layer: Layer) -> dict[str, Any]:
    """The map of the case by a graph, first with rows for itself alone, then, beside it, with the usual room."""
    convolution, found = layer.convolution, []
    if not (isinstance(convolution, Sparseconv) and graphs.has_graphs(convolution.coords.device)):
        return {"reason": "makes no map inside a graph here"}
    for room in (ROOM, USUAL_ROOM):
        try:
            captured = CapturedMap(convolution, room)
        except RuntimeError as error:  # what no graph can hold
            return {"reason": str(error)}
        reason = captured.wrong(layer.x, layer.weight, layer.grad, layer.job.dtype)
        if reason is not None:
            return {"reason": f"with room {room:g} {reason}"}
        found.append({**layer.time(functools.partial(captured, convolution.coords)), "room": room})
    return {**found[0], "usual": found[1]}


class CapturedMap:
    """The plan of a convolution over arrays of a fixed number of rows; a call copies a scene in and replays the graph.

    Everything that a training step uses of the plan is made in the graph: table, row order, schedules of both
    directions, edges by tap, and the weight gradient's jobs.

    Args:
        convolution: whose coordinates are the example, on a GPU.
        room: rows over those that the example has; rounded up to the 256 that `nn.capture` rounds to.
    """

    def __init__(self, convolution: Sparseconv, room: float) -> None:
        coords = convolution.coords
        self._like, self._room = sc.VoxelGrid(coords), room
        rows = -(-math.ceil(room * len(coords)) // fixed_grid.ROWS) * fixed_grid.ROWS
        self._coords, self._count = coords.new_full((rows, coords.shape[1]), -1), coords.new_zeros(1)
        self._put, self._filled = put_scene, 0
        self._load(coords)
        self._twin = twin = copy.copy(convolution)
        twin._used = {}
        x = convolution.weight.new_zeros(rows, convolution.channels)
        for _ in range(2):  # what the first step tries is no part of the map
            twin.prepare_on(self._grid())
            self._step(x, x)
        twin.learn()
        graph, self._fault = graphs.graph_of(self._make, coords.device)
        self._replay = graph.replay

    def _grid(self) -> FixedGrid:
        return FixedGrid(self._coords, self._count, self._like, room=self._room)

    def _make(self) -> torch.Tensor:
        grid = self._grid()
        self._twin.prepare_on(grid)
        return grid.fault

    def _load(self, coords: torch.Tensor) -> None:
        self._put(coords, self._coords, self._count, self._filled)
        self._filled = len(coords)

    def __call__(self, coords: torch.Tensor) -> None:
        """The map of coords (N, 4) int32."""
        self._load(coords)
        self._replay()

    def _step(self, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.detach().requires_grad_()
        self._twin.weight.grad = None
        y = self._twin.forward(x)
        y.backward(grad)
        assert x.grad is not None
        return {"forward": y.detach(), "input_grad": x.grad, "weight_grad": self._twin.weight_grad().detach()}

    def wrong(self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, dtype: str) -> str | None:
        """What is wrong with a step (x (N, C), grad (N, C)) over the maps of the example and of another scene, or None.

        The other scene is a part of the example's voxels in another order. Dead rows are NaN, which nobody may see.
        """
        coords = self._twin.coords
        part = torch.randperm(len(coords), generator=torch.Generator().manual_seed(1))[
            : len(coords) - len(coords) // 16
        ]
        dead = torch.full((len(self._coords) - len(part), x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
        for rows in (part.to(coords.device), torch.arange(len(coords), device=coords.device)):
            scene, lives, grads = coords[rows], x.detach()[rows], grad[rows]
            self(scene)
            filled = [torch.cat([t, dead])[: len(self._coords)] for t in (lives, grads)]
            results = self._step(*filled)
            results |= {name: results[name][: len(rows)] for name in ("forward", "input_grad")}
            verdict = judge(Neighbours(scene, self._twin.kernel), lives, weight, grads, results, dtype)
            if verdict.fault is not None or int(self._fault):
                return verdict.fault or f"the fault flag of the map is {int(self._fault)}"
        return None
