"""Convolutions with spconv's names, arguments and weights (C_out, *kernel, C_in)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.layer import Size, SparseConvolution, SparseConvolutionBase
from sparseconv.interop.spconv.pytorch.modules import Placement

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SparseConvolution", "SparseConvolutionBase"]  # spconv has them in this module


class _Convolution(SparseConvolution):
    """Arguments of all layers but inverse ones; stride and padding mean nothing to submanifold ones."""

    rank = 3
    is_subm = is_transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **factory: Unpack[Placement],
    ) -> None:
        super().__init__(
            self.rank,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            self.is_subm,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            record_voxel_count=record_voxel_count,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
            transposed=self.is_transposed,
            **factory,
        )


class _Submanifold(_Convolution):
    """Arguments of submanifold layers, in spconv's order: no count of voxels, which stay."""

    is_subm = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **factory: Unpack[Placement],
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            indice_key,
            algo,
            fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
            **factory,
        )


class _Inverse(SparseConvolution):
    """Arguments of layers that undo the layer of their key."""

    rank = 3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        indice_key: str,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **factory: Unpack[Placement],
    ) -> None:
        super().__init__(
            self.rank,
            in_channels,
            out_channels,
            kernel_size,
            bias=bias,
            inverse=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
            **factory,
        )


class SparseConv1d(_Convolution):
    """Strided convolution on one axis: outputs are all voxels of the output shape that see an input."""

    rank = 1


class SparseConv2d(_Convolution):
    """Strided convolution on two axes: outputs are all voxels of the output shape that see an input."""

    rank = 2


class SparseConv3d(_Convolution):
    """Strided convolution on three axes: outputs are all voxels of the output shape that see an input."""

    rank = 3


class SparseConv4d(_Convolution):
    """Strided convolution on four axes: outputs are all voxels of the output shape that see an input."""

    rank = 4


class SparseConvTranspose1d(_Convolution):
    """Transposed convolution on one axis, onto every voxel of the output shape that an input reaches."""

    rank = 1
    is_transposed = True


class SparseConvTranspose2d(_Convolution):
    """Transposed convolution on two axes, onto every voxel of the output shape that an input reaches."""

    rank = 2
    is_transposed = True


class SparseConvTranspose3d(_Convolution):
    """Transposed convolution on three axes, onto every voxel of the output shape that an input reaches."""

    rank = 3
    is_transposed = True


class SparseConvTranspose4d(_Convolution):
    """Transposed convolution on four axes, onto every voxel of the output shape that an input reaches."""

    rank = 4
    is_transposed = True


class SubMConv1d(_Submanifold):
    """Submanifold convolution on one axis: outputs are the voxels of the input."""

    rank = 1


class SubMConv2d(_Submanifold):
    """Submanifold convolution on two axes: outputs are the voxels of the input."""

    rank = 2


class SubMConv3d(_Submanifold):
    """Submanifold convolution on three axes: outputs are the voxels of the input."""

    rank = 3


class SubMConv4d(_Submanifold):
    """Submanifold convolution on four axes: outputs are the voxels of the input."""

    rank = 4


class SparseInverseConv1d(_Inverse):
    """The way back on one axis: onto the voxels that the layer of ``indice_key`` started from."""

    rank = 1


class SparseInverseConv2d(_Inverse):
    """The way back on two axes: onto the voxels that the layer of ``indice_key`` started from."""

    rank = 2


class SparseInverseConv3d(_Inverse):
    """The way back on three axes: onto the voxels that the layer of ``indice_key`` started from."""

    rank = 3


class SparseInverseConv4d(_Inverse):
    """The way back on four axes: onto the voxels that the layer of ``indice_key`` started from."""

    rank = 4


#: every class of layer
DEFAULT_SPARSE_CONV_TYPES = {
    kind
    for base in (_Convolution, _Submanifold, _Inverse)
    for kind in base.__subclasses__()
    if kind is not _Submanifold
}
