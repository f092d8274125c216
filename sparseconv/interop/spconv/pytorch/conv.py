"""Convolutions with spconv's names, arguments and weights (C_out, *kernel, C_in)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.interop.layouts import saved_to_krsc
from sparseconv.interop.spconv.constants import SAVED_WEIGHT_LAYOUT
from sparseconv.interop.spconv.core import ConvAlgo, default_algo
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor, expand_nd, whole
from sparseconv.interop.spconv.pytorch.geometry import (
    IndiceData,
    LayerWindow,
    Place,
    check_ends,
    check_reuse,
    find_plan,
)
from sparseconv.interop.spconv.pytorch.modules import Placement, SparseModule
from sparseconv.interop.spconv.pytorch.ops import get_conv_output_size, get_deconv_output_size
from sparseconv.interop.spconv.pytorch.tracing import leaf
from sparseconv.nn.capturing.region import Shape, own_shape, stepped
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.torch_private import any_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack

Size = int | Sequence[int]
RECORD = "max_num_voxels_during_training"


class SparseConvolution(SparseModule):
    """Any of the convolutions below; ``ndim`` first, the kind by ``subm``, ``transposed`` and ``inverse``.

        fine = stride * coarse + dilation * tap - padding        (0 <= coarse < out_spatial_shape)

    Args:
        indice_key: layers with one key share a map. A submanifold layer may reuse one; an inverse layer runs the map
            of the layer that stored it backwards; a key met again with another geometry is an error.
        groups: channel groups; weight (C_out, *kernel, C_in/G).
        algo, fp32_accum, large_kernel_fast_algo: accepted, without effect: the backend is chosen by sparseconv and
            accumulates in fp32.
        record_voxel_count: keep the largest number of output voxels in a buffer.
        where: ``device`` and ``dtype`` of the parameters.

    A layer of one tap at stride 1 is a product of matrices, and as in spconv it reads its weight's memory as
    (C_in, C_out).
    """

    is_convolution = True

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: Size = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: Any = None,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **where: Unpack[Placement],
    ) -> None:
        super().__init__(name)
        if act_type is not None and getattr(act_type, "name", "None_") != "None_":
            raise ValueError(f"activations are not fused into a layer here, put a module after it; got {act_type}")
        if set(where) - {"device", "dtype"}:
            raise TypeError(f"{type(self).__name__} takes no argument {sorted(set(where) - {'device', 'dtype'})}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"channels must be multiples of groups; got {in_channels}, {out_channels}, {groups}")
        self.ndim, self.in_channels, self.out_channels, self.groups = ndim, in_channels, out_channels, groups
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride, self.padding = expand_nd(ndim, stride), expand_nd(ndim, padding)
        self.dilation, self.output_padding = expand_nd(ndim, dilation), expand_nd(ndim, output_padding)
        for what, sizes in (("kernel_size", self.kernel_size), ("stride", self.stride), ("dilation", self.dilation)):
            whole(sizes, what, 1)
        self.subm, self.transposed, self.inverse = subm, transposed, inverse
        self.conv1x1 = math.prod(self.kernel_size) == 1 and (subm or math.prod(self.stride) == 1) and not inverse
        if self.conv1x1 and not subm and any(self.padding):
            raise ValueError(f"a layer of one tap at stride 1 takes no padding; got {self.padding}")
        self.indice_key = indice_key
        self.algo = default_algo(self.kernel_size, 128 if large_kernel_fast_algo else 32) if algo is None else algo
        self.fp32_accum, self.record_voxel_count = fp32_accum, record_voxel_count
        self.weight_shape = [out_channels, *self.kernel_size, in_channels // groups]
        self.weight = torch.nn.Parameter(torch.empty(self.weight_shape, **where))
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_channels, **where)) if bias else None)
        if record_voxel_count and not subm and not inverse:
            self.register_buffer(RECORD, torch.zeros(1, dtype=torch.int32, device=where.get("device")))
        self.reset_parameters()
        self._register_load_state_dict_pre_hook(self._before_loading)

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan_in), weight and bias."""
        bound = 1 / math.sqrt(self.in_channels // self.groups * math.prod(self.kernel_size))
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def _before_loading(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if RECORD in self._buffers:
            state_dict.setdefault(prefix + RECORD, torch.zeros(1, dtype=torch.int32))
        key = prefix + "weight"
        if SAVED_WEIGHT_LAYOUT and key in state_dict:
            state_dict[key] = saved_to_krsc(state_dict[key], SAVED_WEIGHT_LAYOUT)

    def is_inverseable(self) -> bool:
        """Whether an inverse convolution can find this layer's map."""
        return self.indice_key is not None and not self.subm

    def get_max_num_voxels(self) -> torch.Tensor | None:
        """The buffer of ``record_voxel_count``, or None."""
        return self._buffers.get(RECORD)

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        """A `SparseConvTensor` -> one at the output's indices; ``add_input``'s features are added to the result."""
        if not isinstance(input, SparseConvTensor):
            return leaf(self, input, add_input)
        if input.features.shape[1] != self.in_channels:
            raise ValueError(f"the layer takes {self.in_channels} channels; got {tuple(input.features.shape)}")
        if self.conv1x1 and self.groups == 1:
            out = self._multiply(input)
        elif self.inverse:
            out = self._run_back(input)
        else:
            out = self._run(input)
        return out if add_input is None else out.replace_feature(out.features + add_input.features)

    def _multiply(self, input: SparseConvTensor) -> SparseConvTensor:
        rows = input._rows().shape[0]
        if input.features.shape[0] != rows:
            raise ValueError(f"features must be ({rows}, C), one row an index; got {tuple(input.features.shape)}")
        if input.features.dtype != self.weight.dtype and not any_autocast():
            raise TypeError(
                f"features are {input.features.dtype} but the weight is {self.weight.dtype}: cast one, or use "
                "torch.autocast"
            )
        product = input.features @ self.weight.view(self.in_channels, self.out_channels)
        out = input.replace_feature(product if self.bias is None else product + self.bias.to(product.dtype))
        out.spatial_shape = self._out_shape(input)
        return out

    def _run(self, input: SparseConvTensor) -> SparseConvTensor:
        window, voxels = self._window(), input.voxels  # first: with its grid, the input may get another shape
        out_shape = self._out_shape(input)
        stored = input.find_indice_pair(self.indice_key)
        if stored is None:
            plan = find_plan(voxels, window, out_shape, subm=self.subm, transposed=self.transposed)
        else:
            if not self.subm:
                raise ValueError(
                    f"indice_key {self.indice_key!r} is taken: only submanifold layers reuse a map. Give this layer a "
                    "key of its own, or none"
                )
            check_reuse(stored, input, self._window(), self.indice_key)
            plan = stored.plan
        out = self._execute(input, plan)
        if self.subm:
            out.spatial_shape = own_shape(out_shape)
        else:
            out = self._moved(out, plan, out_shape)
        if self.indice_key is not None and stored is None:
            ends = (input._place(), out._place())
            data = IndiceData(plan, *ends, input.spatial_shape, out_shape, self.subm, self.algo, window)
            out.indice_dict = {**input.indice_dict, self.indice_key: data}
        return out

    def _moved(self, out: SparseConvTensor, plan: ConvolutionPlan, shape: list[int]) -> SparseConvTensor:
        count = self._buffers.get(RECORD)
        if count is not None:
            count.clamp_(min=plan.target.num_voxels)
        out.spatial_shape = own_shape(shape)
        if isinstance(shape, Shape) and isinstance(plan.target, FixedGrid):
            plan.target.end_at(shape.limits.row(shape))
        return out._at(Place(None, 0, plan.target))

    def _run_back(self, input: SparseConvTensor) -> SparseConvTensor:
        stored = input.find_indice_pair(self.indice_key)
        if stored is None:
            raise ValueError(
                f"no layer before this one stored indice_key {self.indice_key!r}; there are "
                f"{sorted(map(str, input.indice_dict)) or 'none'}: an inverse convolution undoes the layer of that key"
            )
        if stored.is_subm:
            raise ValueError(f"indice_key {self.indice_key!r} is a submanifold layer's: there is nothing to undo")
        if self.kernel_size != stored.ksize:
            raise ValueError(
                f"the layer of indice_key {self.indice_key!r} has kernel size {stored.ksize}, its inverse "
                f"{self.kernel_size}: they must be equal"
            )
        check_ends(input, stored.out_spatial_shape, stored.out_place, self.indice_key)
        plan = stored.inverse_plan()
        out = self._execute(input, plan)
        out.spatial_shape = own_shape(stored.spatial_shape)
        return out._at(stored.place)

    def _execute(self, input: SparseConvTensor, plan: ConvolutionPlan) -> SparseConvTensor:
        taps = self.weight.reshape(self.out_channels, -1, self.in_channels // self.groups).permute(1, 2, 0)
        return input.replace_feature(plan.with_groups(self.groups).execute(input.features, taps, self.bias))

    def _window(self) -> LayerWindow:
        return LayerWindow(tuple(self.kernel_size), tuple(self.stride), tuple(self.padding), tuple(self.dilation))

    def _out_shape(self, input: SparseConvTensor) -> list[int]:
        if self.subm:
            return input.spatial_shape
        size = (self.kernel_size, self.stride, self.padding, self.dilation)

        def step(shape: Sequence[int]) -> list[int]:
            if self.transposed:
                return get_deconv_output_size(shape, *size, self.output_padding)
            return get_conv_output_size(shape, *size)

        return stepped(input.spatial_shape, step)

    def extra_repr(self) -> str:
        words = [f"{self.in_channels}, {self.out_channels}"]
        words += [f"{n}={getattr(self, n)}" for n in ("kernel_size", "stride", "padding", "dilation", "output_padding")]
        if self.groups != 1:
            words.append(f"groups={self.groups}")
        if self.bias is None:
            words.append("bias=False")
        words.append(f"algo={self.algo}")
        return ", ".join(words)


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
