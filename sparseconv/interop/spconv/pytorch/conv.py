"""spconv's convolutions: weights (C_out, *kernel, C_in), maps shared by ``indice_key``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import REQUIRED, axes, check_algorithm, integers, uniform_
from sparseconv.interop.layouts import saved_to_krsc
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import ConvAlgo, activated, activation_name, default_algo
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.geometry import (
    IndiceData,
    LayerWindow,
    Place,
    check_ends,
    check_reuse,
    conv_size,
    deconv_size,
    find_plan,
)
from sparseconv.interop.spconv.pytorch.modules import Inference, SparseModule, of_ranks
from sparseconv.interop.spconv.pytorch.tracing import leaf
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.torch_private import any_autocast, surely
from sparseconv.transforms import tracing

Size = int | Sequence[int]
RECORD = "max_num_voxels_during_training"


class WindowModule(SparseModule):
    """A layer that moves a window over the voxels: the convolutions, and the pools."""

    subm: bool
    indice_key: str | None
    algo: ConvAlgo

    def _set_window(self, ndim: int, kernel_size: Size, stride: Size, padding: Size, dilation: Size) -> None:
        self.ndim = ndim
        self.kernel_size, self.stride = axes(kernel_size, ndim, "kernel_size", 1), axes(stride, ndim, "stride", 1)
        self.padding, self.dilation = axes(padding, ndim, "padding"), axes(dilation, ndim, "dilation", 1)
        check_taps(self.kernel_size)

    def _window(self) -> LayerWindow:
        return LayerWindow(tuple(self.kernel_size), tuple(self.stride), tuple(self.padding), tuple(self.dilation))

    def get_max_num_voxels(self) -> torch.Tensor | None:
        """The buffer of ``record_voxel_count``, or None."""
        return self._buffers.get(RECORD)

    def _place_output(
        self, input: SparseConvTensor, out: SparseConvTensor, plan: ConvolutionPlan, shape: list[int], is_new: bool
    ) -> SparseConvTensor:
        """``out`` at the output's voxels; a plan that is new is kept under the ``indice_key``."""
        out.spatial_shape = list(shape)
        if not self.subm:
            out = out._at(Place(None, 0, plan.target))
            if (count := self._buffers.get(RECORD)) is not None:
                count.clamp_(min=plan.target.num_voxels)
        elif tracing():
            out = out._at(input._place())
        if self.indice_key is not None and is_new:
            ends = (input._place(), out._place())
            data = IndiceData(plan, *ends, input.spatial_shape, shape, self.subm, self.algo, self._window())
            out.indice_dict = {**input.indice_dict, self.indice_key: data}
        return out


class SparseConvolutionBase:
    """What every convolution is, for `isinstance`."""


class SparseConvolution(SparseConvolutionBase, WindowModule):
    """Any of the convolutions below; ``ndim`` first, the kind by ``subm``, ``transposed`` and ``inverse``.

        fine = stride * coarse + dilation * tap - padding        (0 <= coarse < out_spatial_shape)

    Args:
        indice_key: layers with one key share a map. A submanifold layer may reuse one; an inverse layer runs the map
            of the layer that stored it backwards; a key met again with another geometry is an error.
        groups: channel groups; weight (C_out, *kernel, C_in/G).
        algo, fp32_accum, large_kernel_fast_algo: accepted, without effect: the backend is chosen by sparseconv and
            accumulates in fp32.
        act_type, act_alpha: an activation after the layer, and once more after ``add_input``; `core.Activation`, or
            cumm's of the same names. ``act_alpha`` is the slope of LeakyReLU, ``act_beta`` has no effect.
        record_voxel_count: keep the largest number of output voxels in a buffer.
        device, dtype: of the parameters, by name.

    A layer of one tap at stride 1 is a product of matrices, and as in spconv it reads its weight's memory as
    (C_in, C_out). `constants.ONE_TAP_AS_SPCONV` set to False reads it as (C_out, C_in), its shape.
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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name)
        check_algorithm(algo)
        self.act_type, self.act_alpha, self.act_beta = act_type, act_alpha, act_beta
        self._has_act = activation_name(act_type) != "None_"
        channels = integers([in_channels, out_channels], "channels", 1)
        (groups,) = integers([groups], "groups", 1)
        if any(count % groups for count in channels):
            raise ValueError(f"channels must be multiples of groups; got {channels[0]}, {channels[1]}, {groups}")
        (self.in_channels, self.out_channels), self.groups = channels, groups
        self._set_window(ndim, kernel_size, stride, padding, dilation)
        self.output_padding = axes(output_padding, ndim, "output_padding")
        self.subm, self.transposed, self.inverse = subm, transposed, inverse
        self.conv1x1 = (
            math.prod(self.kernel_size) == 1 and (self.subm or math.prod(self.stride) == 1) and not self.inverse
        )
        if self.conv1x1 and not self.subm and any(self.padding):
            raise ValueError(f"a layer of one tap at stride 1 takes no padding; got {self.padding}")
        fast = default_algo(self.kernel_size, 128 if large_kernel_fast_algo else 32)
        self.indice_key, self.algo = indice_key, fast if algo is None else algo
        self.fp32_accum, self.record_voxel_count = fp32_accum, record_voxel_count
        self.weight_shape = [self.out_channels, *self.kernel_size, self.in_channels // groups]
        self.weight = torch.nn.Parameter(torch.empty(self.weight_shape, device=device, dtype=dtype))
        offset = torch.nn.Parameter(torch.empty(self.out_channels, device=device, dtype=dtype)) if bias else None
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", offset)
        if self.record_voxel_count and not self.subm and not self.inverse:
            self.register_buffer(RECORD, torch.zeros(1, dtype=torch.int32, device=device))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(SparseConvolution._before_loading)  # unbound: it holds no layer

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan_in), weight and bias."""
        uniform_(self.in_channels // self.groups * math.prod(self.kernel_size), self.weight, self.bias)

    def _before_loading(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if RECORD in self._buffers:
            state_dict.setdefault(prefix + RECORD, torch.zeros(1, dtype=torch.int32))
        key = prefix + "weight"
        if constants.SAVED_WEIGHT_LAYOUT and key in state_dict:
            state_dict[key] = saved_to_krsc(state_dict[key], constants.SAVED_WEIGHT_LAYOUT)

    def is_inverseable(self) -> bool:
        """Whether an inverse convolution can find this layer's map."""
        return self.indice_key is not None and not self.subm

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        """A `SparseConvTensor` -> one at the output's indices; ``add_input``'s features are added to the result."""
        if not isinstance(input, SparseConvTensor):
            return leaf(self, input, add_input)
        out = self.convolved(input)
        if self._has_act:
            out = out.replace_feature(activated(out.features, self.act_type, self.act_alpha))
        if add_input is None:
            return out
        return out.replace_feature(activated(out.features + add_input.features, self.act_type, self.act_alpha))

    @property
    def packed_axes(self) -> tuple[int, ...]:
        """The axes of the weight as kernels read it, (*kernel, C_in, C_out), for `nn.pack`; none of a layer that reads
        its memory as (C_in, C_out)."""
        return () if self.conv1x1 and self.groups == 1 else (*range(1, self.ndim + 2), 0)

    @property
    def joins(self) -> bool:
        """Whether a batch norm and an activation after this layer can go into its kernel."""
        plain = type(self).forward is SparseConvolution.forward and not self._has_act
        return plain and not (self.conv1x1 and self.groups == 1)

    def convolved(self, input: SparseConvTensor, after: Inference | None = None) -> SparseConvTensor:
        """A `SparseConvTensor` -> one at the output's indices, where the layer `joins` with what comes ``after``."""
        if input.features.ndim != 2 or input.features.shape[1] != self.in_channels:
            raise ValueError(f"the layer takes {self.in_channels} channels; got {tuple(input.features.shape)}")
        if self.conv1x1 and self.groups == 1:
            return self._multiply(input)
        return self._run_back(input, after) if self.inverse else self._run(input, after)

    def _multiply(self, input: SparseConvTensor) -> SparseConvTensor:
        rows = input._rows().shape[0]
        if surely(input.features.shape[0] != rows):
            raise ValueError(f"features must be ({rows}, C), one row per index; got {tuple(input.features.shape)}")
        weight = self.weight.view(self.in_channels, self.out_channels)
        if not constants.ONE_TAP_AS_SPCONV:
            weight = self.weight.view(self.out_channels, self.in_channels).t()
        if self._halves(input.features):
            weight = weight.to(input.features.dtype)
        elif input.features.dtype != self.weight.dtype and not any_autocast():
            raise TypeError(
                f"features are {input.features.dtype} but the weight is {self.weight.dtype}: cast one, or use "
                "torch.autocast"
            )
        product = input.features @ weight
        out = input.replace_feature(product if self.bias is None else product + self.bias.to(product.dtype))
        out.spatial_shape = self._out_shape(input)
        return out

    def _run(self, input: SparseConvTensor, after: Inference | None) -> SparseConvTensor:
        input._place()  # first: with its grid, the input may get another shape
        out_shape = self._out_shape(input)
        stored = input.find_indice_pair(self.indice_key)
        if stored is None:
            plan = find_plan(input.inside, self._window(), out_shape, subm=self.subm, transposed=self.transposed)
        else:
            if not self.subm:
                raise ValueError(
                    f"indice_key {self.indice_key!r} is taken: only submanifold layers reuse a map. Give this layer a "
                    "key of its own, or none"
                )
            check_reuse(stored, input, self.kernel_size, self.dilation, self.indice_key)
            plan = stored.plan
        out = self._execute(input, plan, after)
        return self._place_output(input, out, plan, out_shape, is_new=stored is None)

    def _run_back(self, input: SparseConvTensor, after: Inference | None) -> SparseConvTensor:
        stored = input.find_indice_pair(self.indice_key)
        if stored is None:
            raise ValueError(
                f"no layer before this one stored indice_key {self.indice_key!r}; there are "
                f"{sorted(map(str, input.indice_dict)) or 'none'}: an inverse convolution undoes the layer of that "
                "key, and a captured module keeps its maps to itself: capture one that holds both layers"
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
        out = self._execute(input, plan, after)
        out.spatial_shape = list(stored.spatial_shape)
        return out._at(stored.place)

    def _execute(self, input: SparseConvTensor, plan: ConvolutionPlan, after: Inference | None) -> SparseConvTensor:
        x, epilogue = input.features, None
        bias: torch.Tensor | None = self.bias
        groups = self.groups
        taps = self.weight.reshape(self.out_channels, -1, self.in_channels // groups).permute(1, 2, 0)
        if after is not None:
            taps, bias = after.folded(x, taps, bias)
            epilogue = after.epilogue
        if self._halves(x):
            taps, bias = taps.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if plan.groups != groups:
            plan = plan.with_groups(groups)
        return input.replace_feature(plan.execute(x, taps, bias, epilogue=epilogue))

    def _halves(self, features: torch.Tensor) -> bool:
        """Whether these are halves and the weight is not: the result is then in halves, as spconv's."""
        halves = features.dtype in (torch.float16, torch.bfloat16)
        return halves and not any_autocast() and self.weight.dtype == torch.float32

    def _out_shape(self, input: SparseConvTensor) -> list[int]:
        return input.spatial_shape if self.subm else self.out_shape_of(input.spatial_shape)

    def out_shape_of(self, spatial_shape: Sequence[int]) -> list[int]:
        """The output shape of a layer that is not submanifold."""
        if self.transposed:
            return deconv_size(spatial_shape, self.kernel_size, self.stride, self.padding, self.output_padding)
        return conv_size(spatial_shape, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        words = [f"{self.in_channels}, {self.out_channels}"]
        words += [f"{n}={getattr(self, n)}" for n in ("kernel_size", "stride", "padding", "dilation", "output_padding")]
        if self.groups != 1:
            words.append(f"groups={self.groups}")
        if self.bias is None:
            words.append("bias=False")
        words.append(f"algo={self.algo}")
        if self._has_act:
            words.append(f"act={self.act_type}")
        return ", ".join(words)


# ---- the classes with a number of axes in their names

_SIZES = "in_channels out_channels kernel_size stride padding dilation groups bias indice_key algo fp32_accum"
_LAST = "large_kernel_fast_algo name"

SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d = of_ranks(
    SparseConvolution,
    "SparseConv",
    "Strided convolution on {}: outputs are all voxels of the output shape that see an input.",
    f"{_SIZES} record_voxel_count {_LAST}",
    {"kernel_size": REQUIRED},
)
SparseConvTranspose1d, SparseConvTranspose2d, SparseConvTranspose3d, SparseConvTranspose4d = of_ranks(
    SparseConvolution,
    "SparseConvTranspose",
    "Transposed convolution on {}, onto every voxel of the output shape that an input reaches.",
    f"{_SIZES} record_voxel_count {_LAST}",
    {"kernel_size": REQUIRED},
    transposed=True,
)
SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d = of_ranks(
    SparseConvolution,
    "SubMConv",
    "Submanifold convolution on {}: outputs are the voxels of the input; stride and padding have no effect.",
    f"{_SIZES} {_LAST}",
    {"kernel_size": REQUIRED},
    subm=True,
)
SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d, SparseInverseConv4d = of_ranks(
    SparseConvolution,
    "SparseInverseConv",
    "The way back on {}: onto the voxels that the layer of ``indice_key`` started from.",
    f"in_channels out_channels kernel_size indice_key bias algo fp32_accum {_LAST}",
    {"kernel_size": REQUIRED, "indice_key": REQUIRED},
    inverse=True,
)

#: every class of layer
DEFAULT_SPARSE_CONV_TYPES = set(SparseConvolution.__subclasses__())
