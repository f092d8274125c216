"""Whole steps on new scenes, their maps built anew, captured once as a CUDA graph and replayed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sparseconv.geometry.aside import current
from sparseconv.geometry.fixed_grid import ROWS, FixedGrid, fault_of, forget_tables
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.nn import graphs
from sparseconv.nn.cross_entropy import FasterLoss
from sparseconv.nn.results import Scene, apart, apart_in_memory, rows_of
from sparseconv.tensor import SparseTensor


def capture(
    network: torch.nn.Module,
    example: SparseTensor,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> CapturedInference:
    """A network's inference, maps included, as one CUDA graph: a call that costs the host next to nothing.

    The graph works on arrays of a fixed number of rows, of which a scene fills the first; everything that depends on
    the scene is decided on the device. `FixedGrid` says what a map may be made of; normalisation by batch item and
    pooling of whole items are not offered.

    A call runs on the current stream and gives new tensors, of the scene's own rows; calls on several streams must wait
    for one another, since they share the graph's memory. What does not fit:

    - a scene that the host sees to be too large (rows, batch items, an ordinary grid's extent) runs without the graph,
      as if nothing had been captured, with a warning;
    - a scene of which the device finds that a voxel lies outside of the extent or occurs twice, or that a coarser grid
      has no room for it, gives NaN (-1 in integers), and a later call or `check` raises the reason.

    The weights are the network's own: a call after they were changed captures again first, which takes some tenths of a
    second. Without a GPU a call is the plain call of the network.

    Args:
        network: in ``eval()``; its output is a `SparseTensor` on the input's grid, a tensor whose rows are the voxels',
            a tensor of a size that no scene changes, or a tuple, list or dict of these.
        example: a scene as they will come, on the network's device; it gives dtype, batch size and typical sizes.
        room: rows of every grid over those that it has for the example, at least 1.
        max_voxels: voxels of the largest scene; default: those of the example times ``room``. Rounded up to 256.
        extent: the box that voxels lie in; default: the example's, grown by an eighth on each side.

    Raises:
        TypeError, ValueError: arguments that do not fit, a network in training, a result whose number of rows the host
            cannot know, or one that changes with the rows that are no voxels.
        RuntimeError: the example does not fit into ``extent``, or the network does what no graph can hold.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> network = nn.UNet(4, 3, channels=(8, 16)).eval()
    >>> scans = [sc.voxelize(torch.rand(n, 3), voxel_size=0.1)[0] for n in (500, 450)]
    >>> fast = nn.capture(network, SparseTensor(scans[0], torch.randn(len(scans[0]), 4)))
    >>> fast(SparseTensor(scans[1], torch.randn(len(scans[1]), 4))).channels
    3
    >>> logits = fast((scans[1].coords, torch.randn(len(scans[1]), 4)))  # no grid, which would wait for the device
    >>> logits.shape == (len(scans[1]), 3)
    True
    """
    return CapturedInference(network, example, None, 0, room, max_voxels, extent)


def capture_step(
    network: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    example: SparseTensor,
    targets: Any,
    *,
    ignore: float = -100,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> CapturedStep:
    """A training step, maps and gradients included, as one CUDA graph: ``step(scene, targets)`` gives the loss.

    The gradients of the network's parameters are then in ``p.grad``, written anew by every call into the same memory
    (clone what must outlive the next one); running statistics have moved. An optimiser's step stays outside, and its
    changes are seen by the next call. Modes, autocast, ``requires_grad`` and hooks are those of the moment of capture;
    hooks on gradients that accumulate, as of data parallelism, are not called. Random numbers are new in every call. To
    scale the loss, let ``loss`` return ``scaler.scale(...)``: the value is then the scaled one.

    A scene that does not fit on the device has the loss NaN and gradients of 0, and a later call raises; other words
    about scenes are those of `capture`.

    Args:
        loss: (the network's output, targets) -> a scalar. It must leave out rows whose target is ``ignore``, as
            torch's cross-entropy does: that is tried on the example.
        targets: of the example: a tensor, or a tuple, list or dict of tensors. Those with a row for each voxel get dead
            rows of ``ignore``, others keep their shape; None where the loss needs none.
        ignore: the target of rows that are no voxels.

    The other arguments and errors are those of `capture`; the network may be in training.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> network = nn.UNet(4, 3, channels=(8, 16))
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> scene, labels = SparseTensor(grid, torch.randn(len(grid), 4)), torch.randint(0, 3, (len(grid),))
    >>> loss = lambda y, targets: torch.nn.functional.cross_entropy(y.features.float(), targets)
    >>> step = nn.capture_step(network, loss, scene, labels)
    >>> optimiser = torch.optim.SGD(network.parameters(), 0.1)
    >>> for _ in range(3):
    ...     value = step(scene, labels)
    ...     optimiser.step()
    >>> bool(value < 2)
    True
    """
    return CapturedStep(network, example, targets, ignore, room, max_voxels, extent, loss)


class _Captured:
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
            self._moved = tuple(moved)

    def _autocast(self) -> torch.autocast:
        kind, dtype, enabled = self._casts
        return torch.autocast(kind, dtype, enabled, cache_enabled=False)

    @torch.inference_mode(False)
    def _record(self) -> None:
        """Capture, with the scene in the arrays."""
        self._replay = self._folded = None
        self._results: Any = None  # an older graph goes first
        with self._unseen():
            self._replay, (self._bad, self._results) = graphs.graph_of(self._padded, self._device)
            # weights folded before the capture: once others have taken their place, the graph alone reads them
            self._folded = [m.__dict__.get("_folded") for m, _ in self._modes]
        forget_tables(self._like)
        self._tensors = [t for kept in self._kept for t in kept.values() if t is not None]
        self._state = self._state_now()

    def _state_now(self) -> Any:
        """What makes a graph stale where it changes: which tensors the network has, and where they lie."""
        held = chain.from_iterable(map(dict.values, self._kept))
        return list(map(id, held)), list(map(torch.Tensor.data_ptr, self._tensors))

    def _run(self, coords: torch.Tensor, features: torch.Tensor, leaves: list[Any]) -> None:
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
        voxels = len(coords)
        for (slot, dead), value in zip(self._slots, (coords, features, *leaves)):
            if dead is not None:
                slot[:voxels].copy_(value)
                if voxels < self._filled:
                    slot[voxels : self._filled].fill_(dead)
            elif isinstance(slot, torch.Tensor):
                slot.copy_(value)
        self._filled = voxels
        self._count.fill_(voxels)

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
            if grid.batch_size > self._like.batch_size:
                why = f"it has {grid.batch_size} batch items of at most {self._like.batch_size}"
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
            self._note(scene.grid)
            self.check()
            mine, alone = rows_of(output, example, len(scene.grid), scene.grid), self.network(example)
            off = apart(mine, alone)
            if off and apart(self.network(example), alone) < off / 2:  # else its results are random
                raise ValueError(
                    f"the rows that are no voxels change the network's result, by {off:.2g} of its rms: every module "
                    "must work on each voxel alone, or be this library's, which know those rows (nn.BatchNorm)"
                )
            self._try_loss(output, padded, mine, targets)

    def _try_loss(self, output: Any, padded: Any, of_rows: Any, targets: Any) -> None:
        """Raise ValueError where a loss counts the rows that are no voxels."""


class CapturedInference(_Captured):
    """What `capture` made: a call for a scene; ``max_voxels`` is the most that it may have."""

    def __init__(self, network: torch.nn.Module, *args: Any) -> None:
        if isinstance(network, torch.nn.Module) and network.training:
            raise ValueError("the network is in training: call network.eval() before nn.capture, or use capture_step")
        super().__init__(network, *args)

    def __call__(self, scene: Scene) -> Any:
        """A `SparseTensor`, or (coords (N, 1+D) int32, features (N, C)) -> the network's result in new tensors.

        What would be a `SparseTensor` on the scene's grid is one, or its features where the scene came without a grid.
        """
        coords, features, _ = self._given(scene, None)
        self._raise()
        if not self._fits(scene, len(coords)):
            with self._as_captured():
                whole = self._whole(scene)
                return rows_of(self._body(whole, None), scene, len(coords), whole.grid)
        self._run(coords, features, [])
        return rows_of(self._results, scene, self.max_voxels, bad=self._bad)

    @torch.no_grad()
    def _body(self, scene: SparseTensor, targets: Any) -> Any:
        with self._autocast():
            return self.network(scene)

    def _state_now(self) -> Any:
        """Their versions too: weights that are folded into others are read from copies."""
        return super()._state_now(), [t._version for t in self._tensors if not t.is_inference()]


class CapturedStep(_Captured):
    """What `capture_step` made: a call for a scene and its targets; ``max_voxels`` is the most that it may have."""

    def __init__(self, network: torch.nn.Module, *args: Any) -> None:
        *rest, self._loss = args
        if isinstance(network, torch.nn.Module):
            self._parameters = [p for p in network.parameters() if p.requires_grad]
        super().__init__(network, *rest)

    def __call__(self, scene: Scene, targets: Any = None) -> torch.Tensor:
        """A scene as `CapturedInference` takes it, targets like the example's -> the loss (), a new tensor."""
        coords, features, leaves = self._given(scene, targets)
        self._raise()
        if self._fits(scene, len(coords)):
            self._run(coords, features, leaves)
            loss, grads = self._results
            loss = loss.clone()
        else:
            with self._as_captured():
                loss, grads = self._body(self._whole(scene), targets)
        for p, grad in zip(self._parameters, grads):
            if p.grad is not grad:
                p.grad = grad
        return loss

    def _body(self, scene: SparseTensor, targets: Any) -> Any:
        # on one thread, whose maps are aside and which has one workspace of cuBLAS
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with self._autocast():
                output = self.network(scene)
                with FasterLoss():
                    loss = self._loss(output, targets)
                del output
            if scene.grid.fault is not None:  # no gradient goes through the NaN
                loss = torch.where(scene.grid.fault[0] != 0, float("nan"), loss)
            grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        aside = current()
        if aside is not None:
            aside.settle(grads)
        return loss.detach(), apart_in_memory(grads)

    def _try_loss(self, output: Any, padded: Any, of_rows: Any, targets: Any) -> None:
        with_dead, without = self._loss(output, padded), self._loss(of_rows, targets)
        if not isinstance(without, torch.Tensor) or without.ndim:
            raise ValueError(f"the loss must be a scalar tensor; got {without!r}")
        off = apart(with_dead, without)
        if off:
            raise ValueError(
                f"the loss counts rows that are no voxels: it is {float(with_dead):.4g} with them and "
                f"{float(without):.4g} without. Leave out rows whose target is `ignore`, as cross-entropy does"
            )
