"""``torchsparse.tensor``: `SparseTensor`, `PointTensor` and the cache that the tensors of one network share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from sparseconv import transforms
from sparseconv.checks import check_kind, check_tensor, own, row
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.views.dense import filled
from sparseconv.interop.arguments import (
    axes,
    check_features,
    check_order,
    check_rows,
    is_unmodified,
    maps_for_trace,
    scaled_coords,
    trace_constants,
)
from sparseconv.interop.torchsparse.conventions import (  # noqa: F401
    Version,
    get_allow_negative_coordinates,
    get_version,
    make_ntuple,
    set_allow_negative_coordinates,
)
from sparseconv.torch_private import settable, surely
from sparseconv.transforms import check_not_recorded, tracing

Ints = tuple[int, ...]
_COORDS = "(N, 4), three axes and the batch"
#: the stride of a tensor: whole numbers, and fractions where a generative layer divided it with a remainder
Strides = tuple[int | Fraction, ...]


def strides(value: Any) -> Strides:
    """A tensor's stride, one number per axis; only fractions are not whole."""
    several = list(value) if isinstance(value, (list, tuple)) else [value]
    if not any(isinstance(step, Fraction) for step in several):
        return tuple(axes(value, 3, "stride", 1))
    if len(several) not in (1, 3) or not all(isinstance(step, (int, Fraction)) and step > 0 for step in several):
        raise ValueError(f"stride must be one number above 0 or 3 of them; got {value}")
    return tuple(_simplest(Fraction(step)) for step in (several if len(several) == 3 else several * 3))


def divided(stride: Strides, steps: Ints) -> Strides:
    """The stride of the finer side of a layer; nothing is rounded, so that each level has a stride of its own."""
    return tuple([Fraction(a) / b if a % b else int(a // b) for a, b in zip(stride, steps)])


def multiplied(stride: Strides, steps: Ints) -> Strides:
    """The stride of the coarser side of a layer."""
    return tuple([_simplest(a * b) for a, b in zip(stride, steps)])


def _whole(stride: Strides) -> Ints:
    """A stride that coordinates are multiples of, as in versions 1.4 and 2.0."""
    steps = tuple(step for step in stride if isinstance(step, int))
    if len(steps) != len(stride):
        raise ValueError(f"coordinates are multiples of the stride, which must be whole; got {written(stride)}")
    return steps


def written(stride: Strides) -> str:
    """A stride in a message, fractions as 1/2."""
    return f"({', '.join(map(str, stride))})"


def _simplest(step: int | Fraction) -> int | Fraction:
    return int(step) if isinstance(step, Fraction) and step.denominator == 1 else step


class TensorCacheMode(Enum):
    """Whether a new tensor gets a cache of its own, or the global one."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class CoordinateMaps(dict[Strides, Any]):
    """Stride -> (coords, spatial range), or coords alone as torchsparse 1.4 and 2.0 keep them; and grids of them."""

    def __init__(self, known: Any = ()) -> None:
        super().__init__(known)
        #: grids by stride, each with the coordinates that it was made of, their version and values
        self.grids: dict[Strides, tuple[torch.Tensor, int, torch.Tensor, VoxelGrid]] = {}


class TensorCache:
    """Coordinates and plans by stride, shared by the tensors of one network.

    ``cmaps``: `CoordinateMaps`. ``kmaps``: (stride, kernel size, stride of the layer, dilation) -> the plan of the
    layer. ``hashmaps`` stays empty.
    """

    def __init__(self, cmaps: Any = None, kmaps: dict[Any, Any] | None = None) -> None:
        self.cmaps: Any = cmaps if isinstance(cmaps, CoordinateMaps) else CoordinateMaps(cmaps or ())
        self.kmaps: dict[Any, Any] = {} if kmaps is None else kmaps
        self.hashmaps: dict[Any, Any] = {}
        self.grids = self.cmaps.grids

    def pair(self, stride: Strides) -> tuple[torch.Tensor, Ints | None] | None:
        """Coordinates and range at a stride, None where they are not known."""
        known = self.cmaps.get(stride)
        return (known, None) if isinstance(known, torch.Tensor) else known


class TracedCache(TensorCache):
    """What a `TensorCache` is in a trace, with plain dictionaries.

    Attributes:
        outer: the cache of the caller that this one stands for, None for one of the trace.
        ordinary: the cache that it became, once somebody asked for it after the program had run.
    """

    def __init__(self, outer: TensorCache | None = None) -> None:
        self.outer = outer
        self.ordinary: TensorCache | None = None
        self.cmaps, self.kmaps, self.hashmaps, self.grids = {}, {}, {}, {}

    @classmethod
    def of(cls, outer: TensorCache) -> TracedCache:
        """A cache with the coordinates of another one, which stays as it is: looked at anew at each run."""
        made = TracedCache(outer)
        for stride, known in outer.cmaps.items():
            made.cmaps[trace_constants(stride)] = known
        for stride, held in outer.grids.items():
            steps, coords = trace_constants(stride), held[0]
            made.grids[steps] = coords, 0, coords, VoxelGrid(inner(coords, steps), held[3].batch_size)
        return made

    def after_trace(self) -> TensorCache:
        """An ordinary cache with what the program made."""
        if self.ordinary is None:
            made = self.ordinary = TensorCache() if self.outer is None else self.outer
            for stride, known in self.cmaps.items():
                made.cmaps.setdefault(stride, known)
            for stride, (coords, _, _, grid) in self.grids.items():
                if stride not in made.grids:
                    made.grids[stride] = coords, coords._version, own(coords), grid.real  # type: ignore[attr-defined]
            for key, plan in self.kmaps.items():
                made.kmaps.setdefault(key, plan.real)
        return self.ordinary


class _Shared:
    mode = TensorCacheMode.SEPARATE_TENSOR_CACHE
    cache: TensorCache | None = None


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    """Choose whether new tensors share the global cache."""
    _Shared.mode = TensorCacheMode(mode)


def get_tensor_cache_mode() -> TensorCacheMode:
    """Whether new tensors share the global cache."""
    return _Shared.mode


def get_global_tensor_cache() -> TensorCache | None:
    """The cache that tensors share, if there is one."""
    return _Shared.cache


def set_global_tensor_cache(tensor_cache: TensorCache | None) -> None:
    """Set the cache that tensors share."""
    _Shared.cache = tensor_cache


def clear_global_tensor_cache() -> None:
    """Forget the cache that tensors share."""
    _Shared.cache = None


def _new_cache() -> TensorCache:
    if _Shared.mode is TensorCacheMode.SEPARATE_TENSOR_CACHE:
        return TensorCache()
    if _Shared.cache is None:
        _Shared.cache = TensorCache()
    return _Shared.cache


def _alias(name: str, checked: Callable[[Any], Any] = lambda value: value) -> Any:
    """A property that is another attribute, whose new values are checked."""
    return settable(lambda self: getattr(self, name), lambda self, value: setattr(self, name, checked(value)))


class SparseTensor:
    """Features (N, C) of voxels.

    Args:
        feats: (N, C); a numpy array, too, until tensors are collated.
        coords: (N, 4) int32, one row per voxel, (batch, x, y, z) in units of the stride; (x, y, z, batch) and multiples
            of the stride after `set_version` ``("2.0")``. Without the batch, (N, 3), until tensors are collated.
        stride: one integer or one per axis; below 1 a `Fraction`, of what a generative layer makes of stride 1.
        spatial_range: (batch items, cells of the axes x, y, z) or None.

    >>> x = SparseTensor(torch.ones(2, 1), torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]]).int())
    >>> x.F.shape, x.s, len(x.grid)
    (torch.Size([2, 1]), (1, 1, 1), 2)
    """

    def __init__(self, feats: Any, coords: Any, stride: Any = 1, spatial_range: Any = None, **old: Any) -> None:
        check_not_recorded()
        if old.keys() - {"cmaps", "kmaps"}:
            raise TypeError(f"SparseTensor takes no argument {sorted(old.keys() - {'cmaps', 'kmaps'})}")
        for name, rows in (("feats", feats), ("coords", coords)):
            if not isinstance(rows, np.ndarray):
                check_tensor(name, rows, "or a numpy array until tensors are collated")
        check_order("SparseTensor(feats, coords, ...)", feats, coords)
        self.feats = feats
        self.coords = coords
        if not tracing() and isinstance(coords, torch.Tensor) and coords.is_inference():
            self.coords = own(coords)
        self.stride = strides(stride)
        self.spatial_range: Ints | None = None
        if spatial_range is not None:
            self.spatial_range = tuple(axes(spatial_range, 4, "spatial_range", 1))
        self._caches: Any = _new_cache()
        if old:  # torchsparse 2.0's: what a tensor shares
            self._caches = TensorCache(old.get("cmaps"), old.get("kmaps"))
        if tracing():  # the voxels are found outside of the trace, which knows of no batch
            transforms.eagerly(_find, self)

    @classmethod
    def made(cls, feats: torch.Tensor, coords: torch.Tensor, stride: Strides, extent: Ints | None, caches: Any) -> Any:
        """A tensor of a layer."""
        if not tracing() and coords.is_inference():
            coords = own(coords)
        made = object.__new__(SparseTensor)
        made.feats, made.coords, made.stride, made.spatial_range, made._caches = feats, coords, stride, extent, caches
        return made

    @settable
    def _caches(self) -> Any:
        return maps_for_trace(self._held, TracedCache)

    @_caches.setter
    def _caches(self, caches: Any) -> None:
        self._held = caches

    F = _alias("feats")
    C = _alias("coords")
    s = _alias("stride", strides)

    @settable
    def cmaps(self) -> dict:
        return self._caches.cmaps

    @cmaps.setter
    def cmaps(self, maps: dict) -> None:
        self._caches = TensorCache(maps, self._caches.kmaps)

    @settable
    def kmaps(self) -> dict:
        return self._caches.kmaps

    @kmaps.setter
    def kmaps(self, maps: dict) -> None:
        self._caches = TensorCache(self._caches.cmaps, maps)

    @property
    def grid(self) -> VoxelGrid:
        """The voxels, in units of the stride and axes backwards; made once for coordinates that nobody wrote to."""
        known = self.known_grid()
        if known is not None:
            return known
        if tracing():
            raise ValueError("these voxels were not looked for before the trace")
        grid = VoxelGrid(inner(self.coords, self.stride))
        self.keep(grid)
        return grid

    def known_grid(self) -> VoxelGrid | None:
        """The grid of these coordinates, where they have one and nobody wrote to them since."""
        if not tracing() and isinstance(self.coords, torch.Tensor) and self.coords.is_inference():
            self.coords = own(self.coords)  # the others tell nobody of writes
        known = self._caches.grids.get(trace_constants(self.stride))  # type: ignore[arg-type]
        return known[3] if known is not None and known[0] is self.coords and is_unmodified(*known[:3]) else None

    def prepare_for_trace(self) -> None:
        """Find the voxels before `sparseconv.accelerate` calls a program: a trace does not know how many batch items
        there are, and would leave the first layer to Python."""
        self.grid  # noqa: B018 (kept)

    def keep(self, grid: VoxelGrid) -> None:
        """Remember the grid of these coordinates."""
        seen = self.coords if tracing() or self.coords.is_cuda else own(self.coords)
        version = 0 if tracing() else self.coords._version
        self._caches.grids[trace_constants(self.stride)] = self.coords, version, seen, grid  # type: ignore[arg-type]

    def like(self, feats: torch.Tensor) -> SparseTensor:
        """Other features at the same coordinates, with the same cache."""
        return SparseTensor.made(feats, self.coords, self.stride, self.spatial_range, self._caches)

    def dense(self) -> torch.Tensor:
        """(B, x, y, z, C), zero where there is no voxel; needs ``spatial_range``."""
        if self.spatial_range is None:
            raise ValueError("dense() needs spatial_range: (batch items, cells of the three axes)")
        return to_dense(self.feats, self.coords, self.spatial_range)

    def to(self, device: Any, non_blocking: bool = True) -> SparseTensor:
        self.coords = self.coords.to(device, non_blocking=non_blocking)
        self.feats = self.feats.to(device, non_blocking=non_blocking)
        return self

    def cpu(self) -> SparseTensor:
        return self.to("cpu")

    def cuda(self) -> SparseTensor:
        return self.to("cuda")

    def half(self) -> SparseTensor:
        self.feats = self.feats.half()
        return self

    def detach(self) -> SparseTensor:
        self.coords, self.feats = self.coords.detach(), self.feats.detach()
        return self

    def __add__(self, other: SparseTensor) -> SparseTensor:
        checked(other)
        if self.feats.shape != other.feats.shape or not is_at(self, other):
            raise ValueError(
                f"cannot add features {tuple(self.feats.shape)} and {tuple(other.feats.shape)}: generative_add adds "
                "tensors at different coordinates"
            )
        return self.like(self.feats + other.feats)


def _find(x: SparseTensor) -> None:
    """Look for the voxels of a tensor; what is wrong with its coordinates is for the first layer to say."""
    if isinstance(x.coords, torch.Tensor):
        with contextlib.suppress(ValueError, TypeError):
            x.grid  # noqa: B018 (which is kept)


def is_at(a: SparseTensor, b: SparseTensor) -> bool:
    """Whether two tensors with as many rows have the same coordinates, where that is known without waiting for a GPU;
    True elsewhere."""
    return a.coords is b.coords or torch.compiler.is_compiling() or a.coords.is_cuda or torch.equal(a.coords, b.coords)


def checked(input: Any) -> SparseTensor:
    """A `SparseTensor` with features (N, C); TypeError or ValueError for anything else."""
    check_kind("the input", input, SparseTensor, "pass a SparseTensor of torchsparse's")
    check_tensor("feats", input.feats, "(N, C)")
    check_tensor("coords", input.coords, _COORDS)
    if input.feats.ndim != 2 or input.coords.ndim < 1 or surely(input.coords.shape[0] != input.feats.shape[0]):
        raise ValueError(
            f"feats must be (N, C), one row for each of coords {tuple(input.coords.shape)}; got "
            f"{tuple(input.feats.shape)}"
        )
    return input


class PointTensor:
    """Features of points anywhere, coordinates (N, 4), and what was looked up for them."""

    def __init__(
        self, feats: torch.Tensor, coords: torch.Tensor, idx_query: dict | None = None, weights: dict | None = None
    ) -> None:
        self.F, self.C = feats, coords
        self.idx_query: dict = {} if idx_query is None else idx_query
        self.weights: dict = {} if weights is None else weights
        self.additional_features: dict[str, dict] = {"idx_query": {}, "counts": {}}

    def to(self, device: Any, non_blocking: bool = True) -> PointTensor:
        self.F, self.C = (t.to(device, non_blocking=non_blocking) for t in (self.F, self.C))
        return self

    def cuda(self) -> PointTensor:
        return self.to("cuda")

    def detach(self) -> PointTensor:
        self.F, self.C = self.F.detach(), self.C.detach()
        return self

    def __add__(self, other: PointTensor) -> PointTensor:
        made = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        made.additional_features = self.additional_features
        return made


# ---- coordinates


def check_coords(coords: Any) -> None:
    """Raise unless these are coordinates of a batch."""
    check_rows("coords", coords, 4, "three axes and the batch")


def inner(coords: torch.Tensor, stride: Strides) -> torch.Tensor:
    """Coordinates (N, 4) as a grid counts them: the batch first, the axes backwards, in units of the stride."""
    check_coords(coords)
    if get_version() is Version.LAST:
        turned = coords.flip(1)
        if any(s != 1 for s in stride):
            turned = torch.div(turned, row((1, *reversed(_whole(stride))), turned), rounding_mode="floor")
        return turned
    return torch.cat([coords[:, :1], coords[:, 1:].flip(1)], 1)


def outer(grid: VoxelGrid, stride: Strides) -> torch.Tensor:
    """`inner` undone: coordinates (N, 4) int32 as the client knows them."""
    if get_version() is Version.LAST:
        return scaled_coords(grid, _whole(stride)[::-1]).flip(1)
    return torch.cat([grid.coords[:, :1], grid.coords[:, 1:].flip(1)], 1)


def to_dense(feats: torch.Tensor, coords: torch.Tensor, spatial_range: Any) -> torch.Tensor:
    """Features (N, C) at coords (N, 4), the batch first -> (B, x, y, z, C); voxels outside raise ValueError."""
    size = make_ntuple(spatial_range, 4)
    check_coords(coords)
    check_features("feats", feats, len(coords), "row of coords")
    if bool(((coords < 0) | (coords >= row(size, coords))).any()):
        raise ValueError(f"some voxels lie outside of the spatial range {size}")
    return filled(feats, coords, size[0], IndexRange.of_shape(size[1:])).movedim(1, -1)


# ---- ``torchsparse.operators``


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Channels side by side; all at one set of coordinates."""
    if not inputs:
        raise ValueError("cat takes one tensor or more; got none")
    counts = [checked(x).feats.shape[0] for x in inputs]
    # a set of them would be one for each scene, in a trace
    if any([surely(count != counts[0]) for count in counts]) or not all([is_at(inputs[0], x) for x in inputs]):
        raise ValueError(
            f"cat takes tensors at the same coordinates, in one order; got {[tuple(x.feats.shape) for x in inputs]}"
        )
    return inputs[0].like(torch.cat([x.feats for x in inputs], 1))


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """The sum over all voxels of two tensors, absent ones counting as 0; voxels in lexicographic order."""
    if checked(a).feats.shape[1] != checked(b).feats.shape[1]:
        raise ValueError(f"tensors must agree in channels; got {tuple(a.feats.shape)} and {tuple(b.feats.shape)}")
    for x in (a, b):
        check_coords(x.coords)
    first, second = (a, b) if len(a.feats) >= len(b.feats) else (b, a)
    coords, rows = torch.unique(torch.cat([first.coords, second.coords]), dim=0, return_inverse=True)
    zeros = first.feats.new_zeros(len(coords), first.feats.shape[1])
    at = rows.split([len(first.feats), len(second.feats)])
    feats = zeros.index_copy(0, at[0], first.feats) + zeros.index_copy(0, at[1], second.feats)
    made = SparseTensor(feats, coords, first.stride, first.spatial_range)
    made._caches = first._caches
    return made
