"""Convolutions in three axes: weights (C_out, Kw, Kh, Kd, C_in), coords (N, 4) with the batch item first."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any, TypeVar

import torch

from sparseconv.checks import check_choice, check_values, own
from sparseconv.compiler.traced import TracedPlan
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints
from sparseconv.interop.arguments import axes, check_features, is_unmodified
from sparseconv.interop.flex_gemm.geometry import bits, sizes, voxels
from sparseconv.ops.serialization import serialize
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.within import dense_shape, plan_within
from sparseconv.transforms import tracing


class Algorithm:
    """Names of FlexGEMM's kernels, which choose nothing here."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


class SerializationMode:
    """The order of the voxels that `sparse_conv3d` makes."""

    BXYZ = 0
    Z_ORDER = 1
    HILBERT = 2


class SparseConv3dOutCoordAlgorithm:
    """How FlexGEMM finds output voxels, which chooses nothing here."""

    HASHMAP = 0
    EXPAND_UNIQUE = 1


ALGORITHM = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
HASHMAP_RATIO = 2.0
OUT_COORD_HASHMAP_RATIO = 1.1
OUT_COORD_ALGO = SparseConv3dOutCoordAlgorithm.HASHMAP
#: obeyed, as it is at a call
SERIALIZATION_MODE = SerializationMode.BXYZ


def set_algorithm(algorithm: str) -> None:
    """Kept in ``ALGORITHM``, without effect.

    Raises:
        ValueError: no name of `Algorithm`.
    """
    global ALGORITHM
    check_choice("algorithm", algorithm, [name for key, name in vars(Algorithm).items() if key.isupper()])
    ALGORITHM = algorithm


def set_hashmap_ratio(ratio: float) -> None:
    """Kept in ``HASHMAP_RATIO``, without effect."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


class _NeighborCache:
    """The plan of a kernel over voxels, for as many calls as like; its tables are made when they are read."""

    def __init__(self, plan: ConvolutionPlan, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> None:
        self._plan = plan
        self._ends = plan.source, plan.target  # a plan does not keep the grids that keep it
        #: by name, the last coordinates that were found to be those of an end, at their version
        self._seen: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation

    @property
    def plan(self) -> ConvolutionPlan:
        """The plan; of a program that has run, the one that it made."""
        return self._plan.real if isinstance(self._plan, TracedPlan) and not tracing() else self._plan

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": {}}

    def check(self, name: str, coords: torch.Tensor) -> None:
        """Raise ValueError unless ``coords`` or ``out_coords`` are those of the plan.

        The values of one tensor are compared once, until somebody writes to it: on a GPU that is a wait.
        """
        if torch.compiler.is_compiling():
            return
        check_values(name, coords, "(N, 4) integers")
        grid = self.plan.target if name == "out_coords" else self.plan.source
        kept, version = self._seen.get(name, (None, 0))
        if kept is not None and kept() is coords and is_unmodified(coords, version, grid.coords.to(coords.dtype)):
            return
        if coords.shape != grid.coords.shape or not torch.equal(coords.to(grid.coords), grid.coords):
            raise ValueError(
                f"the neighbor_cache was found for {len(grid)} other voxels than these {name} {tuple(coords.shape)}: "
                "keep one for each set of voxels, or pass None"
            )
        self.saw(name, coords)

    def saw(self, name: str, coords: torch.Tensor) -> None:
        """Remember that these are the plan's."""
        if not (torch.compiler.is_compiling() or coords.is_inference()):  # which tells nobody that it was written to
            self._seen[name] = weakref.ref(coords), coords._version

    @cached_property
    def neighbor_map(self) -> torch.Tensor:
        """(N_out, V) uint32: the input row at each tap, 2^32 - 1 for none."""
        return self.plan.kernel_map.neighbors.t().contiguous().view(torch.uint32)


class SubMConv3dNeighborCache(_NeighborCache):
    """What `sparse_submanifold_conv3d` found about its voxels."""


class SparseConv3dNeighborCache(_NeighborCache):
    """What `sparse_conv3d` found about its voxels."""

    @cached_property
    def neighbor_map_bwd(self) -> torch.Tensor:
        """(N_in, V) uint32: the output row at each tap, 2^32 - 1 for none."""
        return self.plan.kernel_map.reverse().neighbors.t().contiguous().view(torch.uint32)


Kept = TypeVar("Kept", bound=_NeighborCache)


def sparse_submanifold_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: SubMConv3dNeighborCache | None = None,
    dilation: Any = (1, 1, 1),
) -> tuple[torch.Tensor, SubMConv3dNeighborCache]:
    """A convolution whose outputs are its inputs' voxels.

    Args:
        feats: (N, C_in) floating point.
        coords: (N, 4) integers, the batch item first, within the shape.
        shape: batch size, channels, W, H, D.
        weight: (C_out, Kw, Kh, Kd, C_in), sizes odd.
        bias: (C_out,).
        neighbor_cache: of an earlier call on the same coords; the shape is then not looked at.
        dilation: one integer or three.

    Returns:
        (N, C_out), and the cache for later calls.

    Raises:
        TypeError, ValueError: arguments that do not fit together, or a cache of another kernel or of other voxels.

    >>> coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]])
    >>> y, found = sparse_submanifold_conv3d(torch.ones(2, 4), coords, (1, 4, 2, 2, 2), torch.ones(3, 3, 3, 3, 4))
    >>> y.tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    """
    kernel, gap = _kernel(weight), tuple(axes(dilation, 3, "dilation", 1))
    if neighbor_cache is None:
        neighbor_cache = _submanifold(coords, shape, kernel, gap)
        neighbor_cache.saw("coords", coords)
    else:
        _check_cache(neighbor_cache, SubMConv3dNeighborCache, kernel, dilation=gap)
        neighbor_cache.check("coords", coords)
    return _execute(feats, neighbor_cache, weight, bias), neighbor_cache


def sparse_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: SparseConv3dNeighborCache | None = None,
    out_coords: torch.Tensor | None = None,
    stride: Any = (1, 1, 1),
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
) -> tuple[torch.Tensor, torch.Tensor, SparseConv3dNeighborCache]:
    """A convolution onto every voxel of the dense output that sees an input, or onto given ones.

    Args:
        feats, coords, shape, weight, bias, neighbor_cache: as for `sparse_submanifold_conv3d`, of any kernel size.
        out_coords: (M, 4) integers, the output voxels; default: all, in the order of ``SERIALIZATION_MODE``.
        stride, padding, dilation: one integer or three.

    Returns:
        (M, C_out), out_coords (M, 4) int32, and the cache for later calls.

    >>> coords = torch.tensor([[0, 0, 0, 0], [0, 3, 1, 0]])
    >>> weight = torch.ones(1, 2, 2, 2, 4)
    >>> y, out_coords, _ = sparse_conv3d(torch.ones(2, 4), coords, (1, 4, 4, 4, 4), weight, stride=(2, 2, 2))
    >>> y.tolist(), out_coords.tolist()
    ([[4.0], [4.0]], [[0, 0, 0, 0], [0, 1, 0, 0]])
    """
    window = _window(_kernel(weight), stride, padding, dilation)
    if neighbor_cache is None:
        neighbor_cache = _strided(coords, shape, window, out_coords)
        neighbor_cache.saw("coords", coords)
    else:
        _check_cache(neighbor_cache, SparseConv3dNeighborCache, **window)
        neighbor_cache.check("coords", coords)
        if out_coords is not None:
            neighbor_cache.check("out_coords", out_coords)
    if out_coords is None:
        coords = neighbor_cache.plan.target.coords
        out_coords = coords if tracing() else own(coords)
        neighbor_cache.saw("out_coords", out_coords)
    return _execute(feats, neighbor_cache, weight, bias), out_coords, neighbor_cache


def _kernel(weight: torch.Tensor) -> Ints:
    check_values("weight", weight, "(C_out, Kw, Kh, Kd, C_in)")
    if weight.ndim != 5:
        raise ValueError(f"weight must be (C_out, Kw, Kh, Kd, C_in); got {tuple(weight.shape)}")
    return tuple(weight.shape[1:4])


def _window(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    given = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    return {name: tuple(axes(size, 3, name, int(name != "padding"))) for name, size in given.items()}


def _submanifold(coords: torch.Tensor, shape: Any, kernel: Ints, dilation: Ints) -> SubMConv3dNeighborCache:
    if not all(k % 2 for k in kernel):
        raise ValueError(f"the kernel of a submanifold convolution must have odd sizes, for a middle; got {kernel}")
    items, _, *edges = sizes(shape)
    grid = voxels("coords", coords, items, edges)
    plan = (grid.plan_type or ConvolutionPlan)(grid, kernel, dilation=dilation)
    middle = tuple(d * (k // 2) for k, d in zip(kernel, dilation))
    return SubMConv3dNeighborCache(plan, kernel, (1, 1, 1), middle, dilation)


def _strided(
    coords: torch.Tensor, shape: Any, window: dict[str, Any], out_coords: torch.Tensor | None
) -> SparseConv3dNeighborCache:
    items, _, *edges = sizes(shape)
    grid = voxels("coords", coords, items, edges)
    out_shape = dense_shape(edges, **window)
    if tracing():
        return SparseConv3dNeighborCache(_recorded(grid, out_shape, window, out_coords, items), **window)
    if out_coords is None and min(out_shape) < 1:  # a window larger than the shape
        plan = ConvolutionPlan(grid, target=VoxelGrid(grid.coords[:0], items), **window)
    elif out_coords is None:
        plan = plan_within(grid, out_shape, **window)
        target = _ordered(plan.target, bits(*edges, *out_shape))
        if target is not plan.target:
            plan = ConvolutionPlan(grid, target=target, **window)
    else:
        target = voxels("out_coords", out_coords, items, list(out_shape))
        plan = ConvolutionPlan(grid, target=target, **window)
    return SparseConv3dNeighborCache(plan, **window)


def _recorded(grid: Any, shape: Ints, window: dict[str, Any], out_coords: torch.Tensor | None, items: int) -> Any:
    """The plan of a strided layer while torch traces."""
    if out_coords is not None:
        return grid.plan_type(grid, target=voxels("out_coords", out_coords, items, list(shape)), **window)
    if SERIALIZATION_MODE != SerializationMode.BXYZ:
        raise ValueError("voxels cannot be sorted along a curve while torch traces: give out_coords")
    kernel, *_ = window.values()
    steps = {name: window[name] for name in ("stride", "padding", "dilation")}
    return grid.plan_type.within(grid, shape, kernel, False, **steps)


def _ordered(grid: VoxelGrid, depth: int) -> VoxelGrid:
    """The voxels in the order of ``SERIALIZATION_MODE``; themselves, lexicographic, for the first one."""
    modes = (SerializationMode.BXYZ, SerializationMode.Z_ORDER, SerializationMode.HILBERT)
    if SERIALIZATION_MODE not in modes:
        raise ValueError(f"SERIALIZATION_MODE must be one of {modes}; got {SERIALIZATION_MODE!r}")
    if SERIALIZATION_MODE == SerializationMode.BXYZ:
        return grid
    curve = "z" if SERIALIZATION_MODE == SerializationMode.Z_ORDER else "hilbert"
    return VoxelGrid(grid.coords[serialize(grid, curve, depth).order[0]], grid.batch_size)


def _check_cache(cache: Any, kind: type[Kept], kernel_size: Ints, **window: Ints) -> None:
    """Raise unless a cache is of this kind of convolution and of this window."""
    if not isinstance(cache, kind):
        raise TypeError(f"neighbor_cache must be that of an earlier call of this function; got {type(cache).__name__}")
    for name, wanted in {"kernel_size": kernel_size, **window}.items():
        if getattr(cache, name) != wanted:
            raise ValueError(
                f"the neighbor_cache was found with {name} {getattr(cache, name)}, this call has {wanted}: keep one "
                "for each window"
            )


def _execute(
    feats: torch.Tensor, neighbor_cache: _NeighborCache, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    check_features("feats", feats, len(neighbor_cache.plan.source))
    if feats.shape[1] != weight.shape[4]:
        raise ValueError(f"feats have {feats.shape[1]} channels, the weight {tuple(weight.shape)} takes the last")
    return neighbor_cache.plan.execute(feats, weight.flatten(1, 3).permute(1, 2, 0), bias)


# ---- the steps of a call, for code that takes them one by one


def _backward(
    grad_output: torch.Tensor,
    feats: torch.Tensor,
    neighbor_cache: _NeighborCache,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of feats, weight and bias; None where one requires none."""
    x, w = (t.detach().requires_grad_(t.requires_grad) for t in (feats, weight))
    b = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
    asked = [t for t in (x, w, b) if t is not None and t.requires_grad]
    with torch.enable_grad():
        y = _execute(x, neighbor_cache, w, b)
    found = iter(torch.autograd.grad(y, asked, grad_output) if asked else ())
    return tuple(next(found) if t is not None and t.requires_grad else None for t in (x, w, b))


class SubMConv3dFunction:
    """`sparse_submanifold_conv3d` and its steps, by the names of FlexGEMM's autograd function."""

    @staticmethod
    def apply(
        feats: torch.Tensor, coords: torch.Tensor, shape: Any, neighbor_cache: Any, weight: torch.Tensor, *more: Any
    ) -> tuple[torch.Tensor, SubMConv3dNeighborCache]:
        """`sparse_submanifold_conv3d` with its arguments in another order; ``more`` are bias and dilation."""
        bias, *dilation = more or (None,)
        return sparse_submanifold_conv3d(feats, coords, shape, weight, bias, neighbor_cache, *dilation)

    @staticmethod
    def _compute_neighbor_cache(
        coords: torch.Tensor, shape: Any, kernel_size: Any, dilation: Any, needs_grad: bool = True
    ) -> SubMConv3dNeighborCache:
        window = _window(kernel_size, 1, 0, dilation)
        return _submanifold(coords, shape, window["kernel_size"], window["dilation"])

    _compute_neighbor_cache_torch = _compute_neighbor_cache
    _sparse_submanifold_conv_forward = staticmethod(_execute)
    _sparse_submanifold_conv_backward = staticmethod(_backward)


class SparseConv3dFunction:
    """`sparse_conv3d` and its steps, by the names of FlexGEMM's autograd function."""

    @staticmethod
    def apply(
        feats: torch.Tensor, coords: torch.Tensor, shape: Any, neighbor_cache: Any, weight: torch.Tensor, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor, SparseConv3dNeighborCache]:
        """`sparse_conv3d` with its arguments in another order; ``more`` are bias, out_coords and the window."""
        bias, *window = more or (None,)
        return sparse_conv3d(feats, coords, shape, weight, bias, neighbor_cache, *window)

    @staticmethod
    def _get_output_coords(
        coords: torch.Tensor, shape: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> torch.Tensor:
        return own(_strided(coords, shape, _window(kernel_size, stride, padding, dilation), None).plan.target.coords)

    _get_output_coords_torch = _get_output_coords

    @staticmethod
    def _compute_neighbor_cache(
        coords: torch.Tensor,
        out_coords: torch.Tensor,
        shape: Any,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        needs_grad: bool = True,
        is_out_coords_given: bool = False,
    ) -> SparseConv3dNeighborCache:
        return _strided(coords, shape, _window(kernel_size, stride, padding, dilation), out_coords)

    _compute_neighbor_cache_torch = _compute_neighbor_cache
    _sparse_conv_forward = staticmethod(_execute)
    _sparse_conv_backward = staticmethod(_backward)
