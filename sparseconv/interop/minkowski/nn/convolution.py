"""Convolutions with MinkowskiEngine's names and weights: ``kernel`` (V, C_in, C_out), ``bias`` (1, C_out)."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv import transforms
from sparseconv.interop.arguments import whole
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.kernel_generator import KernelGenerator
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.kinds import Axes, ConvolutionMode, RegionType, rank_of
from sparseconv.interop.minkowski.nn.placement import Place, check_input, ends, place_key
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor
from sparseconv.kinds import check_kind
from sparseconv.ops.neighborhood import depthwise_convolution
from sparseconv.torch_private import tracing


class MinkowskiModuleBase(torch.nn.Module):
    """The class of all layers here."""


def _convolve(
    features: torch.Tensor,
    kernel: torch.Tensor,
    generator: KernelGenerator,
    in_key: CoordinateMapKey,
    out_key: CoordinateMapKey | None,
    manager: CoordinateManager,
    transposed: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, CoordinateMapKey]:
    out_key = ends(in_key, out_key, manager, generator, transposed, generator.expand_coordinates)
    plan = manager.plan(in_key, out_key, generator, transposed)
    taps = kernel if kernel.ndim == 3 else kernel[None]
    return plan.execute(features, taps, None if bias is None else bias.reshape(-1)), out_key


class MinkowskiConvolutionFunction:
    """The convolution as a function of features and kernel; differentiable to any order."""

    transposed = False

    @classmethod
    def apply(
        cls,
        input_features: torch.Tensor,
        kernel_weights: torch.Tensor,
        kernel_generator: KernelGenerator,
        convolution_mode: ConvolutionMode,
        in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C_in) -> (N_out, C_out); an output key that is not set is set to the voxels reached."""
        if coordinate_manager is None:
            raise TypeError("coordinate_manager must be the manager of the keys; got None")
        ends = in_coordinate_map_key, out_coordinate_map_key
        return _convolve(input_features, kernel_weights, kernel_generator, *ends, coordinate_manager, cls.transposed)[0]


class MinkowskiConvolutionTransposeFunction(MinkowskiConvolutionFunction):
    """The transposed convolution as a function."""

    transposed = True


class MinkowskiConvolutionBase(MinkowskiModuleBase):
    """Any of the convolutions below.

        in = out + tap * dilation * tensor stride        (transposed: the other way round)

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride, dilation: one integer or one an axis; a ``kernel_generator`` stands in place of them.
        bias: add a number to each channel.
        expand_coordinates: outputs are all voxels that the kernel reaches, not those that exist already.
        convolution_mode: accepted, without effect.
        dimension: number of axes.
        has_bias, generate_new_coords: the names of ``bias`` and ``expand_coordinates`` in version 0.4.

    A layer of one tap at stride 1 has the weight (C_in, C_out).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = -1,
        has_bias: bool | None = None,
        generate_new_coords: bool | None = None,
    ) -> None:
        super().__init__()
        dimension = rank_of(dimension)
        if generate_new_coords is not None:
            expand_coordinates = generate_new_coords
        (in_channels, out_channels) = whole([in_channels, out_channels], "channels", 1)
        if kernel_generator is None:
            kernel_generator = KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        check_kind("kernel_generator", kernel_generator, KernelGenerator, "leave it out, or make one")
        kernel_generator.expand_coordinates = expand_coordinates
        self.in_channels, self.out_channels, self.dimension = in_channels, out_channels, dimension
        self.is_transpose, self.kernel_generator = is_transpose, kernel_generator
        self.convolution_mode = convolution_mode
        volume = kernel_generator.kernel_volume
        self.use_mm = volume == 1 and all(s == 1 for s in kernel_generator.kernel_stride)
        shape = (in_channels, out_channels) if self.use_mm else (volume, in_channels, out_channels)
        self.kernel = torch.nn.Parameter(torch.empty(shape))
        biased = bias if has_bias is None else has_bias
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(1, out_channels)) if biased else None)
        self.reset_parameters(is_transpose)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        """Uniform in +-1/sqrt(n), n being taps times channels of the input (of the output, where transposed)."""
        channels = self.out_channels if is_transpose else self.in_channels
        bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
        for parameter in (self.kernel, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: SparseTensor, coordinates: Place | None = None) -> SparseTensor:
        """A `SparseTensor` -> one at ``coordinates``, or at the voxels of the output's tensor stride."""
        if tracing() and isinstance(coordinates, torch.Tensor):
            return transforms.eagerly(self.forward, input, coordinates)
        check_input(input, self.dimension)
        if input.F.shape[1] != self.in_channels:
            raise ValueError(f"the layer takes {self.in_channels} channels; got {tuple(input.F.shape)}")
        if self.use_mm and coordinates is None:
            product = input.F @ self.kernel
            return input.like(product if self.bias is None else product + self.bias.to(product.dtype))
        manager = input.coordinate_manager
        features, key = _convolve(
            input.F,
            self.kernel,
            self.kernel_generator,
            input.key,
            place_key(input, manager, coordinates, self.kernel_generator, self.is_transpose),
            manager,
            self.is_transpose,
            self.bias,
        )
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        kernel = self.kernel_generator
        size = f"kernel_size={kernel.kernel_size}"
        if kernel.region_type is RegionType.CUSTOM:
            size = f"region_type={kernel.region_type}, kernel_volume={kernel.kernel_volume}"
        return (
            f"{type(self).__name__}(in={self.in_channels}, out={self.out_channels}, {size}, "
            f"stride={kernel.kernel_stride}, dilation={kernel.kernel_dilation})"
        )


class MinkowskiConvolution(MinkowskiConvolutionBase):
    """A convolution: its outputs are the input's voxels at stride 1, and floor(c / s) * s at other strides."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
        **old: Any,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator, False,
            expand_coordinates, convolution_mode, dimension, **old,
        )  # fmt: skip


class MinkowskiConvolutionTranspose(MinkowskiConvolutionBase):
    """A transposed convolution onto the voxels of the finer tensor stride; without any, all that it reaches."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
        **old: Any,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator, True,
            expand_coordinates, convolution_mode, dimension, **old,
        )  # fmt: skip


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """A transposed convolution onto every voxel that it reaches."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator, True, True,
            convolution_mode, dimension,
        )  # fmt: skip


class MinkowskiChannelwiseConvolution(MinkowskiModuleBase):
    """A convolution of every channel by itself; ``kernel`` (V, C), ``bias`` (1, C). Arguments as above."""

    def __init__(
        self,
        in_channels: int,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        (in_channels,), dimension = whole([in_channels], "in_channels", 1), rank_of(dimension)
        if kernel_generator is None:
            kernel_generator = KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        check_kind("kernel_generator", kernel_generator, KernelGenerator, "leave it out, or make one")
        self.in_channels, self.dimension, self.kernel_generator = in_channels, dimension, kernel_generator
        self.kernel_shape = kernel_generator.kernel_volume, in_channels
        self.kernel = torch.nn.Parameter(torch.empty(self.kernel_shape))
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(1, in_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(taps times channels)."""
        bound = 1 / math.sqrt(self.in_channels * self.kernel_generator.kernel_volume)
        for parameter in (self.kernel, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: SparseTensor, coords: Place | None = None) -> SparseTensor:
        if tracing():  # there is no operator for it
            return transforms.eagerly(self.forward, input, coords)
        check_input(input, self.dimension)
        manager = input.coordinate_manager
        given = place_key(input, manager, coords, self.kernel_generator)
        key = ends(input.key, given, manager, self.kernel_generator)
        out = depthwise_convolution(input.F, self.kernel, manager.plan(input.key, key, self.kernel_generator))
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return SparseTensor(out, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        kernel = self.kernel_generator
        return (
            f"{type(self).__name__}(in={self.in_channels}, region_type={kernel.region_type}, "
            f"kernel_size={kernel.kernel_size}, stride={kernel.kernel_stride}, dilation={kernel.kernel_dilation})"
        )
