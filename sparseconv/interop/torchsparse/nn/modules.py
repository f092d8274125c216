"""Layers with torchsparse's names, arguments and weights: ``kernel`` (V, C_in, C_out), ``bias`` (C_out,)."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import axes, whole
from sparseconv.interop.torchsparse.conventions import Version, get_version
from sparseconv.interop.torchsparse.nn import functional as F
from sparseconv.interop.torchsparse.nn.utils import fapply
from sparseconv.interop.torchsparse.tensor import SparseTensor, checked, inner
from sparseconv.ops.points import PointGroups


class Conv3d(torch.nn.Module):
    """A convolution on three axes.

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride: one integer or one an axis.
        padding: of strided axes and of even ones; odd axes at stride 1 are centred.
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
        self.in_channels, self.out_channels = whole([in_channels, out_channels], "channels", 1)
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
        bound = 1 / math.sqrt(channels * self.kernel_volume)
        for parameter in (self.kernel, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

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


class BatchNorm(torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` over all voxels."""

    def forward(self, input: Any) -> Any:
        return fapply(input, super().forward)


class InstanceNorm(torch.nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` of features (N, C), as torchsparse calls it: over the channels of each voxel."""

    def forward(self, input: Any) -> Any:
        return fapply(input, super().forward)


class GroupNorm(torch.nn.GroupNorm):
    """``torch.nn.GroupNorm`` over the voxels of each batch item; statistics in fp32 for halves."""

    def forward(self, input: Any) -> Any:
        x, items = checked(input).feats, inner(input.coords, input.stride)[:, 0]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        groups = PointGroups(items, int(items.max()) + 1 if len(items) else 0)
        size = x.shape[1] // self.num_groups

        def mean(values: torch.Tensor) -> torch.Tensor:
            """Of each item and group, given to each of its voxels and channels."""
            means = groups.reduce(values, "mean").unflatten(1, (self.num_groups, size)).mean(2)
            return groups.spread(means.repeat_interleave(size, 1))

        centred = x - mean(x)
        out = centred * (mean(centred**2) + self.eps).rsqrt()
        return input.like((out if self.weight is None else out * self.weight + self.bias).to(input.feats.dtype))


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on features."""

    def forward(self, input: Any) -> Any:
        return fapply(input, super().forward)


class LeakyReLU(torch.nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` on features."""

    def forward(self, input: Any) -> Any:
        return fapply(input, super().forward)


class SiLU(torch.nn.SiLU):
    """``torch.nn.SiLU`` on features."""

    def forward(self, input: Any) -> Any:
        return fapply(input, super().forward)


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
