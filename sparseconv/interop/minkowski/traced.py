"""Coordinate managers while torch traces: sets of voxels are grids of the program, and plans its operators."""

from __future__ import annotations

from sparseconv.compiler.traced import TracedGrid
from sparseconv.interop.arguments import settled
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.coordinate_map import CoordinateMap
from sparseconv.torch_private import tracing


class TracedManager(CoordinateManager):
    """What ``CoordinateManager(D)`` makes while torch traces, and what stands for one that was made before.

    Attributes:
        outer: the manager of the caller that this one stands for, None for one of the trace.
        ordinary: the ordinary manager that it became, once somebody asked for it after the program had run.
    """

    outer: CoordinateManager | None = None
    ordinary: CoordinateManager | None = None

    @classmethod
    def of(cls, outer: CoordinateManager) -> TracedManager:
        """A manager with the voxels of another one, which stays as it is."""
        made = TracedManager(*settled([outer.D]))
        made.outer = outer
        for key, held in outer._maps.items():
            made._maps[key] = CoordinateMap(TracedGrid.of(held.grid), settled(held.unit), settled(held.stride))
        return made

    def left(self) -> CoordinateManager:
        """An ordinary manager with the voxels that the program made."""
        if self.ordinary is None:
            made = self.ordinary = CoordinateManager(self.D) if self.outer is None else self.outer
            for key, held in self._maps.items():
                if key not in made._maps:
                    grid: TracedGrid = held.grid  # type: ignore[assignment]
                    made._maps[key] = CoordinateMap(grid.real, held.unit, held.stride)
        return self.ordinary

    def _items(self, *maps: CoordinateMap) -> int:
        return maps[0].grid.batch_size  # which is that of all: nobody knows them here

    @property
    def batch_size(self) -> int:
        return self._items(*self._maps.values())


def met(manager: CoordinateManager) -> CoordinateManager:
    """A tensor's manager: one of the trace while torch traces, an ordinary one else."""
    if tracing():
        if isinstance(manager, TracedManager):
            return manager if manager.ordinary is None else TracedManager.of(manager.ordinary)
        return TracedManager.of(manager)
    return manager.left() if isinstance(manager, TracedManager) else manager


def same(a: CoordinateManager, b: CoordinateManager) -> bool:
    """Whether two managers are one, or stand for one."""
    if a is b:
        return True
    return isinstance(a, TracedManager) and isinstance(b, TracedManager) and a.outer is not None and a.outer is b.outer


CoordinateManager.traced_type = TracedManager
