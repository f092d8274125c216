"""Functions with torchsparse's names: convolution, hashes, voxels of points and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sparseconv import transforms
from sparseconv.checks import INTEGERS, check_values, numbers, row
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.interop.arguments import axes, find_sorted, floor_to_int32, is_unmodified, trace_constants
from sparseconv.interop.torchsparse import conventions as conv_config  # noqa: F401
from sparseconv.interop.torchsparse import geometry
from sparseconv.interop.torchsparse.conventions import (  # noqa: F401
    Dataflow,
    Version,
    get_downsample_mode,
    get_kmap_mode,
    get_version,
    set_downsample_mode,
    set_kmap_mode,
)
from sparseconv.interop.torchsparse.tensor import (
    Ints,
    SparseTensor,
    Strides,
    TensorCache,
    check_coords,
    checked,
    divided,
    inner,
    multiplied,
    outer,
    written,
)
from sparseconv.ops.points import PointGroups
from sparseconv.products import sparse_scale, sparse_scale_infos
from sparseconv.transforms import tracing

#: FNV-1a, its offset as a signed integer
_OFFSET, _PRIME = 14695981039346656037 - 2**64, 1099511628211


def set_conv_mode(conv_mode: Any) -> None:
    """Accepted, without effect: the backend is chosen by sparseconv."""


def conv3d(
    input: SparseTensor,
    weight: torch.Tensor,
    kernel_size: Any,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    config: Any = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
) -> SparseTensor:
    """Convolve: weight (V, C_in, C_out), or (C_in, C_out) for one tap at stride 1.

    A transposed layer runs the map of the earlier layer with its kernel, stride and dilation backwards; a generative
    one makes the voxels that it reaches. Of ``config``, ``kmap_mode`` and ``downsample_mode`` count; ``training`` has
    no effect.

    Raises:
        ValueError: a transposed layer without such a layer before it, or channels that do not fit.
    """
    kernel, steps, gap = (
        tuple(axes(sizes, 3, name, 1))
        for name, sizes in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
    )
    check_values("weight", weight, "(V, C_in, C_out)")
    pad = tuple(axes(padding, 3, "padding"))
    checked(input)
    if weight.ndim not in (2, 3) or weight.shape[-2] != input.feats.shape[1]:
        raise ValueError(
            f"weight must be (V, C_in, C_out), or (C_in, C_out) for one tap; got {tuple(weight.shape)} for features "
            f"{tuple(input.feats.shape)}"
        )
    if bias is not None:
        check_values("bias", bias, "(C_out,)")
        if bias.shape != weight.shape[-1:]:
            raise ValueError(f"bias must be ({weight.shape[-1]},); got {tuple(bias.shape)}")
    if kernel == steps == gap == (1, 1, 1) and not generative:
        product = input.feats @ weight.reshape(weight.shape[-2:])
        return input.like(product if bias is None else product + bias.to(product.dtype))
    taps = weight if weight.ndim == 3 else weight[None]
    sizes = trace_constants(kernel), trace_constants(steps), trace_constants(pad), trace_constants(gap)
    modes = geometry.Modes.of(config)
    if not tracing():
        run = _generated if generative else _undone if transposed else _convolved
        return run(input, input.grid, taps, bias, sizes, modes)  # type: ignore[return-value]
    grid, made = None if generative else input.known_grid(), None
    if grid is not None:
        run = _undone if transposed else _convolved
        made = run(input, grid, geometry.boxed(taps, sizes[0]), bias, sizes, modes)
    if made is not None:
        return made
    given = input, weight, kernel_size, bias, stride, padding, dilation, config, transposed, generative
    return transforms.eagerly(conv3d, *given)


def _convolved(
    input: SparseTensor, grid: VoxelGrid, taps: Any, bias: Any, sizes: tuple[Ints, ...], modes: Any
) -> SparseTensor | None:
    """A layer from a grid to itself, or to coarser voxels; None where torch traces and nobody knows those.

    ``sizes``: of the kernel, the stride, the padding and the dilation.
    """
    kernel, steps, pad, gap = sizes
    caches, stride = input._caches, trace_constants(input.stride)  # type: ignore[arg-type]
    if stride not in caches.cmaps:
        caches.cmaps[stride] = input.coords, input.spatial_range
    key = stride, kernel, steps, gap
    plan, coarser = caches.kmaps.get(key), multiplied(stride, steps)
    is_new = plan is None or plan.source is not grid
    if steps == (1, 1, 1):
        if is_new:
            plan = caches.kmaps[key] = geometry.submanifold(grid, kernel, gap, modes)
        return input.like(plan.execute(input.feats, taps, bias))
    held, known, extent = caches.grids.get(coarser), caches.pair(coarser), None
    if is_new:
        found = geometry.strided(grid, kernel, steps, pad, gap, input.spatial_range, modes)
        if found is None:
            return None
        plan, extent = found
        caches.kmaps[key], caches.cmaps[stride] = plan, (input.coords, input.spatial_range)
    elif known is not None:
        extent = known[1]
    feats = plan.execute(input.feats, taps, bias)
    is_ours = held is not None and known is not None and held[3] is plan.target and known[0] is held[0]
    if is_ours and is_unmodified(*held[:3]):
        return SparseTensor.made(feats, known[0], coarser, known[1], caches)
    made = SparseTensor.made(feats, outer(plan.target, coarser), coarser, extent, caches)
    if known is None:
        caches.cmaps[coarser] = made.coords, extent
    made.keep(plan.target)
    return made


def _undone(
    input: SparseTensor, grid: VoxelGrid, taps: Any, bias: Any, sizes: tuple[Ints, ...], modes: Any
) -> SparseTensor | None:
    """A layer onto the voxels that an earlier one started from; None where torch traces and there is an error."""
    kernel, steps, _, gap = sizes
    caches, finer = input._caches, divided(trace_constants(input.stride), steps)  # type: ignore[arg-type]
    plan, known = caches.kmaps.get((finer, kernel, steps, gap)), caches.pair(finer)
    is_unknown = plan is None or known is None
    if tracing() and (is_unknown or plan.target is not grid):
        return None
    if is_unknown:
        raise ValueError(
            f"no layer before this one went from stride {written(finer)} with kernel size {kernel}, stride {steps} "
            f"and dilation {gap}: a transposed layer undoes such a layer; there are {_listed(caches.kmaps)}"
        )
    if plan.target is not grid and not torch.equal(plan.target.coords, grid.coords):
        raise ValueError(
            f"the layer that went from stride {written(finer)} with kernel size {kernel}, stride {steps} and "
            f"dilation {gap} led to other voxels ({len(plan.target)}) than the input's ({len(grid)}): a "
            "transposed layer undoes a layer on the same voxels"
        )
    feats = plan.transpose().execute(input.feats, taps, bias)
    coords = known[0] if tracing() else _coords_of(plan.source, known[0], caches, finer)
    return SparseTensor.made(feats, coords, finer, known[1], caches)


def _generated(
    input: SparseTensor, grid: VoxelGrid, taps: Any, bias: Any, sizes: tuple[Ints, ...], modes: Any
) -> SparseTensor:
    """A layer onto all finer voxels that it reaches."""
    kernel, steps, _, gap = sizes
    caches, finer = input._caches, divided(input.stride, steps)
    if get_version() is Version.LAST and not all(isinstance(axis, int) for axis in finer):
        raise ValueError(
            "coordinates are multiples of the stride, which a generative layer divides without a remainder: "
            f"{written(input.stride)} by {steps}"
        )
    plan = geometry.generated(grid, kernel, steps, gap, input.spatial_range)
    feats = plan.execute(input.feats, taps, bias)
    caches.kmaps, caches.hashmaps = {}, {}
    made = SparseTensor.made(feats, outer(plan.target, finer), finer, input.spatial_range, caches)
    caches.cmaps[finer] = made.coords, input.spatial_range
    made.keep(plan.target)
    return made


def _listed(kmaps: dict) -> str:
    return ", ".join(str((written(stride), *sizes)) for stride, *sizes in sorted(kmaps)) or "none"


def _coords_of(grid: VoxelGrid, known: torch.Tensor, caches: TensorCache, stride: Strides) -> torch.Tensor:
    """The coordinates of a grid: those ``known`` at its stride, unless another tensor of that stride left them."""
    held = caches.grids.get(stride)
    if held is not None and held[3] is grid:
        return known if held[0] is known or not is_unmodified(*held[:3]) else held[0]
    if grid.count is not None or torch.equal(inner(known, stride).int(), grid.coords):
        return known
    return outer(grid, stride)


def spdownsample(
    coords: torch.Tensor,
    stride: Any = 2,
    kernel_size: Any = 2,
    padding: Any = 0,
    spatial_range: Any = None,
    downsample_mode: str = "spconv",
    tensor_stride: Any = None,
) -> torch.Tensor:
    """The coords of a strided layer's outputs (M, 4), those of the inputs being coords (N, 4), in lexicographic order.

    They are floor(c / stride) where the kernel's windows tile the axes or ``downsample_mode`` is ``"minkowski"``. Else
    they are what a window reaches, below ``spatial_range`` where it is given: (batch items, cells of the outputs).

    After `set_version` ``("2.0")`` the fourth argument is the tensor's own stride, and coordinates are multiples of it.
    """
    steps, kernel = tuple(axes(stride, 3, "stride", 1)), tuple(axes(kernel_size, 3, "kernel_size", 1))
    check_coords(coords)
    coords = _integers("coords", coords)
    last, pad = get_version() is Version.LAST, axes(padding, 3, "padding")
    own = [1, 1, 1]
    if last:
        given = (pad if any(pad) else 1) if tensor_stride is None else tensor_stride
        own, pad = axes(given, 3, "tensor_stride", 1), [0, 0, 0]
    whole = tuple(a * b for a, b in zip(steps, own))
    cells, items = (coords[:, :3], coords[:, 3:]) if last else (coords[:, 1:], coords[:, :1])
    if geometry.tiles(kernel, steps) or downsample_mode == "minkowski":
        cells = torch.div(cells.long(), row(whole, cells), rounding_mode="floor")
        cells = torch.cat([items, cells * row(whole, cells) if last else cells], 1)
    else:
        extent = None
        if spatial_range is not None:  # of the outputs; that of the inputs has the same layer's outputs
            ends = zip(axes(spatial_range, 4, "spatial_range", 1)[1:], steps, kernel, pad)
            extent = (1, *((n - 1) * s + k - 2 * p for n, s, k, p in ends))
        grid = VoxelGrid(inner(coords, tuple(own)), duplicates="first")
        modes = geometry.Modes.of({"kmap_mode": "hashmap", "downsample_mode": downsample_mode})
        plan: Any = geometry.strided(grid, kernel, steps, tuple(pad), (1, 1, 1), extent, modes)
        made = outer(plan[0].target, whole)
        cells = made.roll(1, 1) if last else made
    found = floor_to_int32("coords", torch.unique(cells, dim=0))
    return found.roll(-1, 1) if last else found


def _integers(name: str, values: torch.Tensor) -> torch.Tensor:
    check_values(name, values, "integers")
    if values.dtype not in INTEGERS:
        raise TypeError(f"{name} must be integers; got {values.dtype}")
    return values


# ---- hashes


def sphash(coords: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """60-bit FNV-1a hashes of coords (N, 4) int32: (N,) int64; with offsets (K, 3), added to the first columns, (K, N).

    >>> int(sphash(torch.zeros(1, 4, dtype=torch.int32)))
    947293587111810033
    """
    check_values("coords", coords, "(N, 4) int32")
    if coords.dtype != torch.int32 or coords.ndim != 2 or coords.shape[1] != 4:
        raise ValueError(f"coords must be (N, 4) int32; got {tuple(coords.shape)} {coords.dtype}")
    words = coords.long()
    if offsets is not None:
        offsets = _integers("offsets", offsets)
        if offsets.ndim != 2 or offsets.shape[1] != 3:
            raise ValueError(f"offsets must be (K, 3); got {tuple(offsets.shape)}")
        items = words[None, :, 3:].expand(len(offsets), -1, 1)
        words = torch.cat([words[None, :, :3] + offsets[:, None].long(), items], 2)
    hashed = torch.full(words.shape[:-1], _OFFSET, dtype=torch.int64, device=coords.device)
    for column in words.unbind(-1):
        hashed = (hashed ^ (column & 0xFFFFFFFF)) * _PRIME
    return ((hashed >> 60) & 0xF) ^ (hashed & 0xFFFFFFFFFFFFFFF)


def sphashquery(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """The row of each query among references (M,) int64, the first of equal ones, -1 where it is absent.

    >>> sphashquery(torch.tensor([5, 9]), torch.tensor([7, 5, 5])).tolist()
    [1, -1]
    """
    queries, references = _integers("queries", queries), _integers("references", references)
    ordered, order = torch.sort(references.flatten(), stable=True)
    if len(ordered) == 0:
        return torch.full_like(queries, -1)
    place, there = find_sorted(ordered, queries.flatten())
    return torch.where(there, order[place], -1).view(queries.shape)


# ---- points and voxels


def spcount(coords: torch.Tensor, num: Any) -> torch.Tensor:
    """How many of the rows (N,) name each of ``num`` voxels, (num,) int32; rows below 0 name none."""
    (count,) = axes(num, 1, "num", 0)
    coords = _integers("coords", coords).flatten()
    if len(coords) and coords.device.type == "cpu" and int(coords.max()) >= count:  # a GPU checks by itself
        raise ValueError(f"there are {count} voxels; a row names voxel {int(coords.max())}")
    rows = torch.where(coords < 0, count, coords.long())
    return torch.bincount(rows, minlength=count + 1)[:count].int()


def spvoxelize(feats: torch.Tensor, coords: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The sum of points' features (N, C) in each voxel, over its count: rows (N,), counts (V,) -> (V, C)."""
    counts = _integers("counts", counts)
    if counts.ndim != 1:
        raise ValueError(f"counts must be (V,); got {tuple(counts.shape)}")
    check_values("feats", feats, "(N, C)")
    wide = feats.to(torch.promote_types(feats.dtype, torch.float32)) if feats.is_floating_point() else feats
    total = PointGroups(_integers("coords", coords).long(), len(counts)).reduce(wide, "sum")
    return (total / counts.clamp_min(1)[:, None].to(total.dtype)).to(feats.dtype)


def calc_ti_weights(coords: torch.Tensor, idx_query: torch.Tensor, scale: float = 1) -> torch.Tensor:
    """Weights of the 8 voxels around each point, the last axis fastest, 0 where absent, divided by their sum.

    Args:
        coords: (N, 3) or more, the three axes first.
        idx_query: (N, 8) rows of the voxels, -1 where absent; (8, N) as in versions 1.4 and 2.0.
        scale: edge of a voxel.

    Returns:
        The weights, in the shape of ``idx_query``.
    """
    idx_query = _integers("idx_query", idx_query)
    (scale,) = numbers(scale, 1, "scale", positive=True)
    check_values("coords", coords, "(N, 3) or more")
    if coords.ndim != 2 or coords.shape[1] < 3 or (not coords.is_floating_point() and coords.dtype not in INTEGERS):
        raise ValueError(f"coords must be numbers (N, 3) or more; got {tuple(coords.shape)} {coords.dtype}")
    if tuple(idx_query.shape) not in ((len(coords), 8), (8, len(coords))):
        raise ValueError(f"idx_query must be ({len(coords)}, 8) or (8, {len(coords)}); got {tuple(idx_query.shape)}")
    across = idx_query.shape[0] == 8 and (idx_query.shape[1] != 8 or get_version() is Version.LAST)
    with torch.no_grad():
        part = coords[:, :3] / scale - torch.floor(coords[:, :3] / scale)
        weights = part.new_ones(len(part), 1)
        for axis in range(3):
            pair = torch.stack([1 - part[:, axis], part[:, axis]], 1)
            weights = (weights[:, :, None] * pair[:, None]).flatten(1)
        weights = weights * ((idx_query.t() if across else idx_query) >= 0)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-8)
    return weights.t().contiguous() if across else weights


def spdevoxelize(feats: torch.Tensor, coords: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of voxels' features (V, C) at each point: rows (N, K), -1 for none, weights (N, K) -> (N, C)."""
    coords = _integers("coords", coords)
    check_values("weights", weights, "(N, K)")
    check_values("feats", feats, "(V, C)")
    if coords.ndim != 2 or coords.shape != weights.shape or feats.ndim != 2:
        raise ValueError(
            f"coords and weights must be (N, K), feats (V, C); got {tuple(coords.shape)}, {tuple(weights.shape)} and "
            f"{tuple(feats.shape)}"
        )
    held = (coords >= 0).flatten().nonzero()[:, 0]
    points = torch.div(held, max(1, coords.shape[1]), rounding_mode="floor")
    infos = sparse_scale_infos(
        coords.flatten()[held].long(), points, weights.detach().flatten()[held], len(coords), len(feats)
    )
    return sparse_scale(feats, *infos).to(feats.dtype)


def spcrop(input: SparseTensor, coords_min: Any = None, coords_max: Any = None) -> SparseTensor:
    """The voxels with coords_min <= c < coords_max on every axis."""
    inner(checked(input).coords, input.stride)  # which says what coordinates must be
    voxels = input.coords[:, 1:] if get_version() is Version.FIRST else input.coords[:, :3]
    mask = torch.ones(len(voxels), dtype=torch.bool, device=voxels.device)
    if coords_min is not None:
        mask &= (voxels >= row(axes(coords_min, 3, "coords_min"), voxels)).all(1)
    if coords_max is not None:
        mask &= (voxels < row(axes(coords_max, 3, "coords_max"), voxels)).all(1)
    return SparseTensor(input.feats[mask], input.coords[mask], input.stride)


# ---- activations and pools


def relu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    """``torch.nn.functional.relu`` on features."""
    return checked(input).like(F.relu(input.feats, inplace=inplace))


def silu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    """``torch.nn.functional.silu`` on features."""
    return checked(input).like(F.silu(input.feats, inplace=inplace))


def leaky_relu(input: SparseTensor, negative_slope: float = 0.1, inplace: bool = True) -> SparseTensor:
    """``torch.nn.functional.leaky_relu`` on features."""
    return checked(input).like(F.leaky_relu(input.feats, negative_slope, inplace))


def global_avg_pool(inputs: SparseTensor) -> torch.Tensor:
    """(B, C): the mean of each batch item; 0 for an empty one."""
    return items_of(inputs).reduce(inputs.feats, "mean")


def global_max_pool(inputs: SparseTensor) -> torch.Tensor:
    """(B, C): the maximum of each batch item; 0 for an empty one."""
    return items_of(inputs).reduce(inputs.feats, "max")


def items_of(x: SparseTensor) -> PointGroups:
    """The rows of each batch item."""
    items = inner(checked(x).coords, x.stride)[:, 0]
    return PointGroups(items, int(items.max()) + 1 if len(items) else 0)
