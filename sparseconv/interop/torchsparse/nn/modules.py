"""``torchsparse.nn.modules``: layers, with weights ``kernel`` (V, C_in, C_out) and ``bias`` (C_out,)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import axes, integers, uniform_
from sparseconv.interop.torchsparse.conventions import Version, get_version, make_ntuple
from sparseconv.interop.torchsparse.nn import functional as F
from sparseconv.interop.torchsparse.tensor import SparseTensor, checked, inner, multiplied, outer
from sparseconv.ops.points import PointGroups
from sparseconv.ops.pooling import sum_pool
from sparseconv.plan.convolution import ConvolutionPlan


def fapply(input: SparseTensor, fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """The tensor with ``fn`` of its features."""
    return checked(input).like(fn(input.feats, *args, **kwargs))


def get_kernel_offsets(size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu") -> torch.Tensor:
    """(V, 3) int32: the taps of a kernel in the order of a layer's weight, from -(k - 1) // 2 on every axis.

    >>> get_kernel_offsets((1, 1, 2)).tolist()
    [[0, 0, 0], [0, 0, 1]]
    """
    kernel, steps, gaps = (make_ntuple(v, 3) for v in (size, stride, dilation))
    axes = [(torch.arange(k) - (k - 1) // 2) * s * d for k, s, d in zip(kernel, steps, gaps)]
    odd = kernel[0] * kernel[1] * kernel[2] % 2
    taps = torch.cartesian_prod(*axes[::-1]).flip(1) if odd else torch.cartesian_prod(*axes)
    return taps.int().to(device)


class Conv3d(torch.nn.Module):
    """A convolution on three axes.

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride: one integer or one per axis.
        padding: of strided axes and of even ones; odd axes at stride 1 are centered.
        dilation: distance of taps, obeyed.
        bias: add a number to each channel.
        transposed: undo the earlier layer with this kernel size and stride.
        generative: with ``transposed``, make every voxel that is reached.
        config: its ``kmap_mode`` and ``downsample_mode`` count for this layer, the rest has no effect.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: Any = None,
    ) -> None:
        super().__init__()
        if generative and not transposed:
            raise ValueError("a generative layer is a transposed one: pass transposed=True, too")
        self.in_channels, self.out_channels = integers([in_channels, out_channels], "channels", 1)
        if isinstance(dilation, bool):
            raise TypeError(
                "dilation must be whole numbers: padding comes before it since torchsparse 2.1, so name the arguments, "
                "as bias=True"
            )
        axes(dilation, 3, "dilation", 1)
        self.dilation = dilation
        self.kernel_size, self.stride = (
            tuple(axes(sizes, 3, name, 1)) for name, sizes in (("kernel_size", kernel_size), ("stride", stride))
        )
        check_taps(self.kernel_size)
        given = axes(padding, 3, "padding")
        centred = [k % 2 == 1 and s == 1 for k, s in zip(self.kernel_size, self.stride)]
        self.padding = tuple((k - 1) // 2 if c else p for c, k, p in zip(centred, self.kernel_size, given))
        self.transposed, self.generative, self._config = transposed, generative, config
        self.kernel_volume = math.prod(self.kernel_size)
        alone = self.kernel_volume == 1 and (self.stride == (1, 1, 1) or get_version() is Version.LAST)
        channels = self.in_channels, self.out_channels
        shape = channels if alone else (self.kernel_volume, *channels)
        self.kernel = torch.nn.Parameter(torch.empty(shape))
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(self.out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(n), n being taps times channels of the input (of the output, where transposed)."""
        channels = self.out_channels if self.transposed else self.in_channels
        uniform_(channels * self.kernel_volume, self.kernel, self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        return F.conv3d(
            input,
            self.kernel,
            self.kernel_size,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self._config,
            transposed=self.transposed,
            generative=self.generative,
        )

    def extra_repr(self) -> str:
        words = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        words += [f"stride={self.stride}"] * (self.stride != (1, 1, 1))
        words += [f"dilation={self.dilation}"] * (self.dilation != 1) + ["bias=False"] * (self.bias is None)
        words += ["transposed=True"] * self.transposed + ["generative=True"] * self.generative
        return ", ".join(words)


class _OnFeatures:
    """Runs the layer of torch behind it on the features of a tensor."""

    def forward(self: Any, input: Any) -> Any:
        return fapply(input, super().forward)  # type: ignore[misc]


def _on_features(name: str, layer: type[torch.nn.Module]) -> Any:
    """The class ``name``: a layer of torch that takes and returns a tensor of torchsparse's."""
    own = {"__doc__": f"``torch.nn.{layer.__name__}`` on features.", "__module__": __name__}
    return type(name, (_OnFeatures, layer), own)


BatchNorm = _on_features("BatchNorm", torch.nn.BatchNorm1d)
#: of features (N, C), as torchsparse calls it: over the channels of each voxel
InstanceNorm = _on_features("InstanceNorm", torch.nn.InstanceNorm1d)
ReLU, LeakyReLU, SiLU = (
    _on_features(layer.__name__, layer) for layer in (torch.nn.ReLU, torch.nn.LeakyReLU, torch.nn.SiLU)
)


class GroupNorm(torch.nn.GroupNorm):
    """``torch.nn.GroupNorm`` over the voxels of each batch item; statistics in fp32 for halves."""

    def forward(self, input: Any) -> Any:
        groups, x = F.items_of(input), input.feats.to(torch.promote_types(input.feats.dtype, torch.float32))
        size = x.shape[1] // self.num_groups

        def mean(values: torch.Tensor) -> torch.Tensor:
            """Of each item and group, given to each of its voxels and channels."""
            means = groups.reduce(values, "mean").unflatten(1, (self.num_groups, size)).mean(2)
            return groups.spread(means.repeat_interleave(size, 1))

        centred = x - mean(x)
        out = centred * (mean(centred**2) + self.eps).rsqrt()
        return input.like((out if self.weight is None else out * self.weight + self.bias).to(input.feats.dtype))


class GlobalAvgPool(torch.nn.Module):
    """(B, C): the mean of each batch item."""

    def forward(self, input: SparseTensor) -> torch.Tensor:
        return F.global_avg_pool(input)


class GlobalMaxPool(torch.nn.Module):
    """(B, C): the maximum of each batch item."""

    def forward(self, input: SparseTensor) -> torch.Tensor:
        return F.global_max_pool(input)


class SparseCrop(torch.nn.Module):
    """The voxels with coords_min <= c < coords_max on every axis."""

    def __init__(self, coords_min: Any = None, coords_max: Any = None) -> None:
        super().__init__()
        self.coords_min, self.coords_max = coords_min, coords_max

    def forward(self, input: SparseTensor) -> SparseTensor:
        return F.spcrop(input, self.coords_min, self.coords_max)


# ---- layers from voxels to a map seen from above: one axis, usually the height, goes into channels or is summed up
#
# ``dim`` counts the axes x, y, z from 0, in both conventions of `set_version`. Numbers are those of torchsparse 1.4 and
# 2.0; in 2.1 these layers take the batch for an axis, or raise.


def _axis(dim: int) -> int:
    (found,) = integers([dim], "dim", 0)
    if found > 2:
        raise ValueError(f"dim must be 0, 1 or 2, an axis of x, y, z; got {dim}")
    return found


def _flattened(grid: VoxelGrid, dim: int) -> tuple[VoxelGrid, torch.Tensor]:
    """The voxels of a grid (batch, z, y, x) with 0 along an axis, each once, and the row of each voxel among them."""
    coords = grid.coords.clone()
    coords[:, 3 - dim] = 0
    columns, rows = torch.unique(coords, dim=0, return_inverse=True)
    return VoxelGrid(columns, grid.batch_size), rows


def _summed(
    input: SparseTensor, kernel: torch.Tensor, bias: torch.Tensor | None, dim: int
) -> tuple[torch.Tensor, VoxelGrid]:
    """The sum over each column of features times the matrix of their height, and the columns."""
    grid, count = input.grid, len(kernel)
    low, high = grid.extent.start[2 - dim], grid.extent.end[2 - dim]
    if len(grid) and (low < 0 or high > count):
        raise ValueError(
            f"along axis {dim} there are voxels from {low} to {high - 1}, and kernels for 0 to {count - 1}: "
            "a layer needs a kernel for each height"
        )
    taps = [tuple(height if axis == 2 - dim else 0 for axis in range(3)) for height in range(count)]
    plan = ConvolutionPlan(grid, taps=taps, target=_flattened(grid, dim)[0])
    total = plan.execute(input.feats, kernel)
    if bias is not None:  # of each voxel, as in torchsparse
        total = total + sum_pool(torch.ones_like(input.feats[:, :1], requires_grad=False), plan) * bias
    return total, plan.target


class _Kernels(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int, count: int, dim: int, bias: bool) -> None:
        super().__init__()
        self.in_channels, self.out_channels = integers([in_channels, out_channels], "channels", 1)
        (self.n_kernels,) = integers([count], "n_kernels", 1)
        self.dim = _axis(dim)
        self.kernel = torch.nn.Parameter(torch.empty(self.n_kernels, self.in_channels, self.out_channels))
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(1, self.out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(C_in); the bias stays."""
        uniform_(self.in_channels, self.kernel)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, n_kernels={self.n_kernels}, dim={self.dim}"


class ToBEVConvolution(_Kernels):
    """A matrix for each height, summed up over columns: a sparse map, 0 along ``dim``.

    Args:
        in_channels, out_channels: channels.
        n_kernels: heights that there may be, in units of the tensor's stride.
        stride: columns of so many cells per axis are one, and the tensor's stride is so many times larger.
        dim: the axis of the height.
        bias: add a number to each channel, for each voxel of a column.
    """

    def __init__(
        self, in_channels: int, out_channels: int, n_kernels: int, stride: int = 1, dim: int = 1, bias: bool = False
    ) -> None:
        super().__init__(in_channels, out_channels, n_kernels, dim, bias)
        (self.stride,) = integers([stride], "stride", 1)

    def forward(self, input: SparseTensor) -> SparseTensor:
        total, columns = _summed(checked(input), self.kernel, self.bias, self.dim)
        if self.stride > 1:
            coords = torch.div(columns.coords, self.stride, rounding_mode="floor")
            coords[:, 0] = columns.coords[:, 0]
            coarse, rows = torch.unique(coords, dim=0, return_inverse=True)
            total = PointGroups(rows, len(coarse)).reduce(total, "sum")
            columns = VoxelGrid(coarse, columns.batch_size)
        steps = multiplied(input.stride, (self.stride,) * 3)
        return SparseTensor(total, outer(columns, steps), steps)


class ToDenseBEVConvolution(_Kernels):
    """A matrix for each height, summed up over columns: a dense map (B, C_out, U, V) of the other two axes.

    Args:
        in_channels, out_channels: channels.
        shape: cells of the axes x, y, z, in units of the tensor's stride.
        offset: taken off the coordinates of the map, in their own unit.
        dim: the axis of the height.
        bias: add a number to each channel, for each voxel of a column.
    """

    shape: torch.Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        shape: Sequence[int] | torch.Tensor,
        offset: Sequence[int] = (0, 0, 0),
        dim: int = 1,
        bias: bool = False,
    ) -> None:
        cells, axis = axes(shape, 3, "shape", 1), _axis(dim)
        super().__init__(in_channels, out_channels, cells[axis], axis, bias)
        _keep_box(self, cells, offset)

    def forward(self, input: SparseTensor) -> torch.Tensor:
        total, columns = _summed(checked(input), self.kernel, self.bias, self.dim)
        flat = SparseTensor(total, outer(columns, input.stride), input.stride)
        return _dense(self, self.dim, flat, total, heights=1)


class ToBEVHeightCompression(torch.nn.Module):
    """Heights side by side in the channels: a dense map (B, heights * C, U, V), the channels of a height together.

    Args:
        channels: C.
        shape, offset, dim: as of `ToDenseBEVConvolution`. Heights outside of ``shape`` go to its ends.
    """

    shape: torch.Tensor

    def __init__(
        self, channels: int, shape: Sequence[int] | torch.Tensor, offset: Sequence[int] = (0, 0, 0), dim: int = 1
    ) -> None:
        super().__init__()
        (self.channels,) = integers([channels], "channels", 1)
        self.dim = _axis(dim)
        _keep_box(self, axes(shape, 3, "shape", 1), offset)

    def forward(self, input: SparseTensor) -> torch.Tensor:
        return _dense(self, self.dim, checked(input), input.feats, heights=int(self.shape[self.dim]))

    def extra_repr(self) -> str:
        return f"channels={self.channels}"


class ToBEVReduction(torch.nn.Module):
    """The mean of each column along ``dim``: a sparse map, 0 along it."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = _axis(dim)

    def forward(self, input: SparseTensor) -> SparseTensor:
        columns, rows = _flattened(checked(input).grid, self.dim)
        mean = PointGroups(rows, len(columns)).reduce(input.feats, "mean")
        return SparseTensor(mean, outer(columns, input.stride), input.stride)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def _keep_box(module: torch.nn.Module, cells: list[int], offset: Sequence[int]) -> None:
    """``shape`` and ``offset`` as the buffers that torchsparse's files have."""
    module.register_buffer("offset", torch.tensor([[*axes(offset, 3, "offset"), 0]], dtype=torch.int32))
    module.register_buffer("shape", torch.tensor(cells, dtype=torch.int32))


def _dense(module: torch.nn.Module, dim: int, input: SparseTensor, feats: torch.Tensor, heights: int) -> torch.Tensor:
    """Features in (B, heights * C, U, V); heights go to the nearest that there is."""
    offset, shape = module.get_buffer("offset")[0, :3], module.get_buffer("shape").tolist()
    first = get_version() is Version.FIRST
    moved = input.coords - torch.nn.functional.pad(offset, (1, 0) if first else (0, 1))
    cells = inner(moved, input.stride).long()
    height = cells[:, 3 - dim].clamp(0, heights - 1)
    seen = [axis for axis in range(3) if axis != dim]
    (u, v), (wide, deep) = (cells[:, 3 - axis] for axis in seen), (shape[axis] for axis in seen)
    outside = (u < 0) | (u >= wide) | (v < 0) | (v >= deep)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"voxel {input.coords[row].tolist()} lies outside of a map of {wide} x {deep} cells at stride "
            f"{input.stride}: pass a larger shape, or an offset"
        )
    batch = int(cells[:, 0].max()) + 1 if len(cells) else 0
    at = ((cells[:, 0] * wide + u) * deep + v) * heights + height
    flat = feats.new_zeros(batch * wide * deep * heights, feats.shape[1])
    whole_map = flat.index_add(0, at, feats).view(batch, wide, deep, -1)
    return whole_map.permute(0, 3, 1, 2).contiguous()
