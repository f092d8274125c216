"""What captured calls share: scenes in arrays of a fixed size, the graph over them, and its faults."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from sparseconv import transforms
from sparseconv.geometry.fixed_grid import ROWS, FixedGrid, forget_tables
from sparseconv.geometry.fixed_grid_io import fault_of, put_scene
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu import graphs
from sparseconv.gpu.stream_mutex import StreamMutex
from sparseconv.nn.results import Scene, has_others, put_rows, rows_of
from sparseconv.ops.comparing import largest_gap
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree


class Captured:
    """What both kinds share: arrays that a scene is copied into, the graph over them, and its faults."""

    def __init__(
        self,
        network: torch.nn.Module,
        example: SparseTensor,
        targets: Any,
        ignore: float,
        room: float,
        max_voxels: int | None,
        extent: IndexRange | Sequence[int] | None,
    ) -> None:
        if not isinstance(network, torch.nn.Module):
            raise TypeError(f"network must be a torch.nn.Module; got {type(network).__name__}")
        if not isinstance(example, SparseTensor) or example.grid.count is not None or example.grid.is_shared:
            raise TypeError(f"the example must be a SparseTensor on an ordinary grid; got {example!r}")
        voxels = len(example.grid)
        most = math.ceil(room * voxels) if max_voxels is None else max_voxels
        if voxels == 0 or room < 1 or most < voxels:
            raise ValueError(
                "the example must have voxels and must fit itself, room be at least 1 and max_voxels at least the "
                f"example's; got {voxels} voxels, room {room}, max_voxels {max_voxels}"
            )
        self.network, self.max_voxels = network, -(-most // ROWS) * ROWS
        self._room, self._extent, self._device = max(room, self.max_voxels / voxels), extent, example.device
        #: whose turn it is to use the arrays and the graph
        self._turns = StreamMutex()
        self._modes = [(m, m.training) for m in network.modules()]
        self._kept: list[dict[str, Any]] = [d for m in network.modules() for d in (m._parameters, m._buffers) if d]
        kind = self._device.type
        self._casts = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        grid = example.grid
        # a grid of its own, so that what is kept with it is what the graph needs
        self._like = VoxelGrid(grid.coords, grid.batch_size, grid.voxel_size, grid.origin)
        self._dtype, self._channels = example.dtype, example.channels
        leaves, self._form = pytree.tree_flatten(targets)
        if not all(t is None or isinstance(t, torch.Tensor) for t in leaves):
            raise TypeError(f"targets must be tensors, or a tuple, list or dict of tensors; got {targets!r}")
        #: of each target: whether it has a row for each voxel, its shape, dtype and device
        self._wanted = [
            None if t is None else (t.ndim > 0 and len(t) == voxels, tuple(t.shape), t.dtype, t.device) for t in leaves
        ]
        self._replay: Callable[[], None] | None = None
        #: whether results hold more than rows of voxels, such as rows of batch items
        self._is_by_item = False
        self._has_graph = graphs.has_graphs(self._device)
        if self._has_graph:
            self._make_room(leaves, ignore)
            self._load(grid.coords, example.features, leaves)
            self._try(example, targets)
            self._record()
            self.check()

    @torch.inference_mode(False)
    def _make_room(self, leaves: list[Any], ignore: float) -> None:
        rows, device = self.max_voxels, self._device
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        coords = torch.full((rows, self._like.rank + 1), -1, dtype=torch.int32, device=device)
        features = torch.zeros((rows, self._channels), dtype=self._dtype, device=device)
        #: what a scene is copied into, and what dead rows hold there; None for one that has no rows
        self._slots: list[tuple[Any, float | None]] = [(coords, -1), (features, 0)]
        for leaf, wanted in zip(leaves, self._wanted):
            if wanted is not None and wanted[0]:
                self._slots.append((leaf.new_full((rows, *leaf.shape[1:]), ignore), ignore))
            else:
                self._slots.append((leaf if leaf is None else leaf.clone(), None))
        self._filled = 0
        self._tripped = torch.zeros(1, dtype=torch.int32, device=device)
        told = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        #: the faults of all scenes so far, on their way to the host; read without a wait
        self._told, self._told_on_host = told, told.numpy()

    # ---- a run

    def _body(self, scene: SparseTensor, targets: Any) -> Any:
        """What is captured, on a scene of fixed size; the same on an ordinary one."""
        raise NotImplementedError

    def _scene(self) -> tuple[SparseTensor, Any]:
        """The scene in the arrays, and its targets."""
        (coords, _), (features, _), *targets = self._slots
        grid = FixedGrid(coords, self._count, self._like, extent=self._extent, room=self._room)
        return SparseTensor(grid, features), pytree.tree_unflatten([slot for slot, _ in targets], self._form)

    def _padded(self) -> tuple[torch.Tensor, Any]:
        """Whether the scene in the arrays did not fit, (1,) bool, and its results."""
        scene, targets = self._scene()
        results = self._body(scene, targets)
        return self._note(scene.grid), results

    def _note(self, grid: VoxelGrid) -> torch.Tensor:
        """Whether something did not fit, (1,) bool; told to the host."""
        fault: Any = grid.fault
        self._tripped |= fault
        self._told.copy_(self._tripped, non_blocking=True)
        return fault != 0

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """Modes as they were at capture."""
        now = [m.training for m, _ in self._modes]
        for module, mode in self._modes:
            module.training = mode
        try:
            yield
        finally:
            for (module, _), mode in zip(self._modes, now):
                module.training = mode

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """What a run moves, running statistics and random numbers, is afterwards what it was before."""
        buffers = [(b, b._version, b.clone()) for b in self.network.buffers() if not b.is_inference()]
        moved = []
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), self._as_captured():
                yield
        finally:
            with torch.no_grad():
                for buffer, version, before in buffers:
                    if buffer._version != version:
                        buffer.copy_(before)
                        moved.append(buffer)
                    else:  # torch's own norms write their statistics without a new version
                        buffer.data.copy_(before)
            self._moved = tuple(moved)

    def _autocast(self) -> torch.autocast:
        kind, dtype, enabled = self._casts
        return torch.autocast(kind, dtype, enabled, cache_enabled=False)

    @torch.inference_mode(False)
    def _record(self) -> None:
        """Capture, with the scene in the arrays."""
        self._replay = None
        self._results: Any = None  # an older graph goes first
        with self._unseen():
            graph, (self._bad, self._results) = graphs.graph_of(self._padded, self._device)
            self._replay = graph.replay
        forget_tables(self._like)
        self._tensors = [t for kept in self._kept for t in kept.values() if t is not None]
        self._state = self._state_now()

    def _state_now(self) -> Any:
        """What makes a graph stale where it changes: which tensors the network has, and where they lie."""
        held = chain.from_iterable(map(dict.values, self._kept))
        return list(map(id, held)), list(map(torch.Tensor.data_ptr, self._tensors))

    @transforms.constant
    def _run(self, coords: torch.Tensor, features: torch.Tensor, *leaves: Any) -> None:
        """Copy a scene in and replay."""
        self._load(coords, features, leaves)
        if self._state != self._state_now():
            graphs.wait_for(self._device)
            self._record()
        self._replay()  # type: ignore[misc]
        if self._moved:
            torch.autograd.graph.increment_version(self._moved)

    @torch.no_grad()
    def _load(self, *given: Any) -> None:
        coords, features, leaves = given
        put_scene(coords, self._slots[0][0], self._count, self._filled)
        for (slot, dead), value in zip(self._slots[1:], (features, *leaves)):
            if dead is not None:
                put_rows(value, slot, self._filled, dead)
            elif isinstance(slot, torch.Tensor):
                slot.copy_(value)
        self._filled = len(coords)

    # ---- scenes

    def _given(self, scene: Scene, targets: Any) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        """Coords, features and targets of a scene, checked on the host."""
        if isinstance(scene, SparseTensor):
            if scene.grid.count is not None or scene.grid.is_shared or scene.grid.rank != self._like.rank:
                raise TypeError(f"a scene is on an ordinary grid of rank {self._like.rank}; got {scene.grid}")
            coords, features = scene.grid.coords, scene.features
        else:
            if not isinstance(scene, tuple) or len(scene) != 2:
                raise TypeError(f"a scene is a SparseTensor or (coords, features); got {type(scene).__name__}")
            coords, features = scene
            if coords.dtype != torch.int32 or coords.ndim != 2 or coords.shape[1] != self._like.rank + 1:
                raise TypeError(
                    f"coords must be (N, {self._like.rank + 1}) int32; got {tuple(coords.shape)} {coords.dtype}"
                )
        if features.shape != (len(coords), self._channels) or features.dtype != self._dtype:
            raise ValueError(
                f"features must be ({len(coords)}, {self._channels}) {self._dtype}, as the example's; got "
                f"{tuple(features.shape)} {features.dtype}"
            )
        if not coords.device == features.device == self._device:
            raise ValueError(f"this was captured on {self._device}; got {coords.device} and {features.device}: move it")
        leaves, form = pytree.tree_flatten(targets)
        if any(isinstance(t, torch.Tensor) and transforms.followed(t) for t in (features, *leaves)):
            raise RuntimeError(
                "a captured run has no derivative by its scene, and torch.func or forward mode asks for one: call the "
                "network itself, or detach the features before"
            )
        if form != self._form or any(
            isinstance(a, torch.Tensor) != (b is not None) for a, b in zip(leaves, self._wanted)
        ):
            raise TypeError(f"targets must have the form of the example's; got {targets!r}")
        for leaf, wanted in zip(leaves, self._wanted):
            if wanted is None:
                continue
            by_row, shape, *kind = wanted
            shape = (len(coords), *shape[1:]) if by_row else shape
            if tuple(leaf.shape) != shape or [leaf.dtype, leaf.device] != kind:
                raise ValueError(f"a target must be {shape} {kind}; got {tuple(leaf.shape)} {leaf.dtype} {leaf.device}")
        return coords, features, leaves

    def _fits(self, scene: Scene, voxels: int) -> bool:
        """Whether the graph can take the scene, as far as the host knows; a warning where it cannot."""
        if not self._has_graph:
            return False
        why = f"it has {voxels} voxels of at most {self.max_voxels}" if voxels > self.max_voxels else None
        if why is None and isinstance(scene, SparseTensor):
            grid = scene.grid
            most = self._like.batch_size
            if grid.batch_size > most:
                why = f"it has {grid.batch_size} batch items of at most {most}"
            elif self._is_by_item and grid.batch_size < most:
                why = f"it has {grid.batch_size} batch items, and what was captured gives results of {most}"
            elif voxels and grid.extent.intersect(self._box) != grid.extent:
                why = f"its extent is {grid.extent}, that of the capture {self._box}"
        if why is not None:
            warnings.warn(f"a scene does not fit and runs without the captured graph: {why}", stacklevel=3)
        return why is None

    def _whole(self, scene: Scene) -> SparseTensor:
        """The scene on a grid of its own."""
        if isinstance(scene, SparseTensor):
            return scene
        (coords, features), like = scene, self._like
        items = max(like.batch_size, 1 + int(coords[:, 0].max()) if len(coords) else 0)
        return SparseTensor(VoxelGrid(coords, items, like.voxel_size, like.origin), features)

    # ---- faults

    def check(self) -> None:
        """Wait for the device, and raise RuntimeError if a scene since the last error did not fit."""
        if self._has_graph:
            graphs.wait_for(self._device)
            self._raise()

    def _raise(self) -> None:
        """Raise if a fault has arrived."""
        if self._has_graph and self._told_on_host[0]:
            graphs.wait_for(self._device)
            fault = fault_of(int(self._told_on_host[0]))
            self._tripped.zero_()
            self._told.zero_()
            raise RuntimeError(
                f"a scene before this call did not fit what was captured, and its result is NaN: {fault}. Capture with "
                f"more room (now {self._room:g}), a larger extent (now {self._box}) or a fuller example"
            )

    # ---- the example

    @torch.no_grad()
    def _try(self, example: SparseTensor, targets: Any) -> None:
        """Raise where the example does not fit, or the rows that are no voxels change a result."""
        scene, padded = self._scene()
        self._box = scene.grid.extent
        with self._unseen(), self._autocast():
            output = self.network(scene)
            self._is_by_item = has_others(output, len(scene.grid))
            self._note(scene.grid)
            self.check()
            mine, alone = rows_of(output, example, len(scene.grid), scene.grid), self.network(example)
            off = largest_gap(mine, alone)
            if off and largest_gap(self.network(example), alone) < off / 2:  # else its results are random
                raise ValueError(
                    f"the rows that are no voxels change the network's result, by {off:.2g} of its rms: every module "
                    "must work on each voxel alone, or be this library's, which know those rows (nn.BatchNorm)"
                )
            self._try_loss(output, padded, mine, targets)

    def _try_loss(self, output: Any, padded: Any, of_rows: Any, targets: Any) -> None:
        """Raise ValueError where a loss counts the rows that are no voxels."""
