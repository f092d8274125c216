"""The steps of an integer network: each takes values by number and makes one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.backends.base import Request
from sparseconv.backends.integers import LARGEST, Rescale, check_integers, rescaled
from sparseconv.backends.registry import choose
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.nn.geometry import LayerGeometry
from sparseconv.nn.models.resnet import FloorAvgPool, coarsened
from sparseconv.ops import pooling
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.quantization.recording import filled
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Int8, Int32

Values = dict[int, Any]  # sparse tensors, or plain ones (N, C), by number


def convolve(
    plan: ConvolutionPlan,
    x: Int8[torch.Tensor, "N_in C_in"],
    weight: Int8[torch.Tensor, "K C_in/G C_out"],
    bias: Int32[torch.Tensor, " C_out"] | None = None,
    *,
    rescale: Rescale | None = None,
    residual: Int8[torch.Tensor, "N_out C_out"] | None = None,
) -> Int8[torch.Tensor, "N_out C_out"] | Int32[torch.Tensor, "N_out C_out"]:
    """A convolution in integers over a plan: the same bytes on every device, backend and number of threads.

    Args:
        plan: any `ConvolutionPlan`; its backend and its groups hold.
        x: (N_in, C_in) int8, from -127 to 127.
        weight: (K, C_in/G, C_out) int8, from -127 to 127.
        bias: (C_out,) int32 or None.
        rescale: how sums become int8; None for the sums.
        residual: (N_out, C_out) int8, added before rounding; needs a ``rescale``.

    Returns:
        (N_out, C_out), int8 after a ``rescale``, else int32 sums. There is no gradient.

    Raises:
        TypeError: other dtypes. ValueError: shapes, devices or numbers that do not fit, and a layer whose sums could
            pass 2^31.

    >>> from sparseconv import VoxelGrid
    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
    >>> x = torch.tensor([[100], [-50]], dtype=torch.int8)
    >>> weight = torch.tensor([[[1]], [[2]], [[3]]], dtype=torch.int8)
    >>> plan = ConvolutionPlan(grid, 3)
    >>> convolve(plan, x, weight).tolist()
    [[50], [0]]
    >>> convolve(plan, x, weight, rescale=Rescale(torch.tensor([1 << 15], dtype=torch.int32), 16)).tolist()
    [[25], [0]]
    """
    return _over(plan.kernel_map, plan.groups, plan.backend, x, weight, bias, rescale, residual)


def _over(
    kernel_map: KernelMap,
    groups: int,
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rescale: Rescale | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    channels = (x.shape[-1], weight.shape[-1])
    request = Request(kernel_map, kernel_map.device, torch.int8, *channels, groups)
    check_integers(kernel_map, groups, x, weight, bias, rescale, residual)
    return choose(request, backend).integers(x, weight, kernel_map, groups, bias, rescale, residual)


class Step(torch.nn.Module):
    """One step: reads ``inputs``, writes ``output``."""

    kind = ""

    def __init__(self, name: str, inputs: Sequence[int], output: int) -> None:
        super().__init__()
        self.name, self.inputs, self.output = name, tuple(inputs), output

    def run(self, values: Values) -> Any:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.name}: {', '.join(map(str, self.inputs))} -> {self.output}"


class StepWithNumbers(Step):
    """One that has numbers of Python, which a state_dict carries as they are."""

    #: attributes that hold them
    extra_state_names: tuple[str, ...] = ("numbers",)

    def get_extra_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.extra_state_names}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name in self.extra_state_names:
            setattr(self, name, copy.copy(state[name]))


class Quantize(Step):
    """Floating point -> int8: round(x / scale), ties to even, within -127 to 127; NaN is 0."""

    kind = "quantize"

    def __init__(self, name: str, inputs: Sequence[int], output: int, scale: float) -> None:
        super().__init__(name, inputs, output)
        self.register_buffer("inverse", fixed(torch.tensor([1 / scale])))

    def run(self, values: Values) -> Any:
        return on_features(values[self.inputs[0]], lambda x: self.narrowed(x.float() * number(self.inverse)))

    def narrowed(self, scaled: torch.Tensor) -> torch.Tensor:
        """fp32 -> 8 bits, in place where it can be."""
        return scaled.round_().clamp_(-LARGEST, LARGEST).nan_to_num_(0.0).to(torch.int8)


class Dequantize(Step):
    """Integers -> fp32: x * scale, rounded once."""

    kind = "dequantize"

    def __init__(self, name: str, inputs: Sequence[int], output: int, scale: torch.Tensor) -> None:
        super().__init__(name, inputs, output)
        self.register_buffer("scale", fixed(scale))

    def run(self, values: Values) -> Any:
        return on_features(values[self.inputs[0]], lambda x: x.float() * number(self.scale))


class Convolution(StepWithNumbers):
    """A convolution or linear layer in 8 bits: its weight (K, C_in/G, C_out), its bias, and how it finds its edges."""

    kind = "convolution"
    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: Any
    layer: Any

    def __init__(
        self,
        name: str,
        inputs: Sequence[int],
        output: int,
        layer: torch.nn.Module,
        weight: torch.Tensor,
        bias: torch.Tensor,
        rescale: Any,
        where: dict[str, int],
    ) -> None:
        super().__init__(name, inputs, output)
        self.layer, self.where = shell(layer), dict(where)
        self.backend = "auto"  # the layer's own; another name here comes before it
        # a tap's input channels lie together for each output: matrix units of 8 bits read a weight so
        self.register_buffer("weight", weight.mT.contiguous().mT)
        self.register_buffer("bias", fixed(bias))
        self.register_buffer("multiplier", None if rescale is None else fixed(rescale.multiplier))
        self.numbers = {} if rescale is None else self.numbers_of(rescale)

    def run(self, values: Values) -> Any:
        x, *others = (values[number] for number in self.inputs)
        kernel_map, target, groups, backend = self._edges(x, values)
        backend = backend if self.backend == "auto" else self.backend
        residual = features_in(others[0]) if others else None
        y = self.convolved(features_in(x), kernel_map, groups, backend, residual)
        return y if target is None else SparseTensor(target, y)

    def convolved(
        self, x: torch.Tensor, kernel_map: KernelMap, groups: int, backend: str, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The features of the result."""
        raise NotImplementedError

    def numbers_of(self, rescale: Any) -> dict[str, Any]:
        """Those of a rescale beside its multipliers."""
        raise NotImplementedError

    def _edges(self, x: Any, values: Values) -> tuple[KernelMap, Any, int, str]:
        if isinstance(self.layer, torch.nn.Linear):
            if isinstance(x, SparseTensor):
                plan = LayerGeometry(x.grid.rank, 1).plan(x.grid)
                return plan.kernel_map, x.grid, 1, "auto"
            rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
            offsets = torch.tensor([0, len(x)], device=x.device)
            return KernelMap(len(x), len(x), 1, pairs=(rows, rows, offsets), identity_tap=0), None, 1, "auto"
        plan = self.layer.plan(x, **{name: values[number].grid for name, number in self.where.items()})
        return plan.kernel_map, plan.target, plan.groups, plan.backend


class IntegerConvolution(Convolution):
    """A convolution or linear layer, with the norm, residual and activation that followed it.

    ``weight`` is int8, ``bias`` (C_out,) and ``multiplier`` (C_out,) int32; without a rescale the result is the sums.
    """

    def numbers_of(self, rescale: Rescale) -> dict[str, Any]:
        return {name: getattr(rescale, name) for name in ("shift", "residual_multiplier", "slope", "low")}

    def convolved(
        self, x: torch.Tensor, kernel_map: KernelMap, groups: int, backend: str, residual: torch.Tensor | None
    ) -> torch.Tensor:
        rescale = Rescale(self.multiplier, **self.numbers) if self.numbers else None
        return _over(kernel_map, groups, backend, x, self.weight, self.bias, rescale, residual)


class Affine(StepWithNumbers):
    """A norm that follows no convolution: x * weight + bias with int32 numbers per channel, rescaled."""

    kind = "norm"
    multiplier: torch.Tensor

    def __init__(
        self, name: str, inputs: Sequence[int], output: int, weight: torch.Tensor, bias: torch.Tensor, rescale: Rescale
    ) -> None:
        super().__init__(name, inputs, output)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("multiplier", rescale.multiplier)
        self.numbers = {name: getattr(rescale, name) for name in ("shift", "slope", "low")}

    def run(self, values: Values) -> Any:
        rescale = Rescale(self.multiplier, **self.numbers)
        return on_features(values[self.inputs[0]], lambda x: rescale.apply(x.int() * self.weight + self.bias))


class Combine(StepWithNumbers):
    """The sum of rescaled int8 values, rounded once, or their channels side by side, each rescaled; an activation."""

    kind = "combine"
    extra_state_names = ("multipliers", "rounding")

    def __init__(
        self,
        name: str,
        inputs: Sequence[int],
        output: int,
        multipliers: Sequence[int],
        shift: int,
        slope: int = 1 << 16,
        low: int = -LARGEST,
        concatenates: bool = False,
    ) -> None:
        super().__init__(name, inputs, output)
        self.multipliers, self.concatenates = list(multipliers), concatenates
        self.rounding = (shift, slope, low)

    def run(self, values: Values) -> Any:
        first = values[self.inputs[0]]
        parts = [features_in(values[number]) for number in self.inputs]
        if not self.concatenates:
            return placed(first, rescaled(parts, self.multipliers, *self.rounding))
        same = 1 << self.rounding[0]
        pairs = zip(parts, self.multipliers)
        parts = [part if m == same else rescaled([part], [m], *self.rounding) for part, m in pairs]
        return placed(first, torch.cat(parts, 1))


class Pooling(Step):
    """A pooling layer, down or back up."""

    def __init__(
        self, name: str, inputs: Sequence[int], output: int, layer: torch.nn.Module, where: dict[str, int]
    ) -> None:
        super().__init__(name, inputs, output)
        self.layer, self.where = shell(layer), dict(where)

    def run(self, values: Values) -> Any:
        x = values[self.inputs[0]]
        plan = pooling_plan(self.layer, x, values, self.where)
        return SparseTensor(plan.target, self.pooled(x.features.float(), plan))

    def pooled(self, x: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
        """The features of the result, of integers in fp32, which holds them and their sums exactly."""
        raise NotImplementedError


class MaxPooling(Pooling):
    """The largest int8 of each window, 0 where there is none."""

    kind = "max pooling"

    def pooled(self, x: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
        return pooling.max_pool(x, plan)[0].to(torch.int8)


class SumPooling(Pooling, StepWithNumbers):
    """The sum of each window times a multiplier for its number of voxels.

    ``multipliers`` (K+1,) int32, by the number of voxels: all alike for a sum, 1/n of the first for a mean.
    """

    kind = "sum pooling"
    extra_state_names = ("shift",)
    multipliers: torch.Tensor

    def __init__(
        self,
        name: str,
        inputs: Sequence[int],
        output: int,
        layer: torch.nn.Module,
        where: dict[str, int],
        multipliers: torch.Tensor,
        shift: int,
    ) -> None:
        super().__init__(name, inputs, output, layer, where)
        self.shift = shift
        self.register_buffer("multipliers", multipliers)

    def pooled(self, x: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
        sums = pooling.sum_pool(x, plan).int()
        counts = pooling.sum_pool(x.new_ones(len(x), 1), plan)
        rows = self.multipliers[counts[:, 0].long()]
        turned = Rescale(rows, self.shift).apply(sums.T)  # a row has its multiplier here, as a channel has elsewhere
        return turned.T.contiguous()


class Wide(Step):
    """A layer left as it was: on fp32, and only as reproducible as it is."""

    kind = "wide"

    def __init__(self, name: str, inputs: Sequence[int], output: int, layer: torch.nn.Module, call: Any) -> None:
        super().__init__(name, inputs, output)
        self.layer, self.call = copy.deepcopy(layer), call

    def run(self, values: Values) -> Any:
        args, kwargs = filled(
            self.call, lambda ref: values[ref.value] if ref.is_sparse else features_in(values[ref.value])
        )
        made = self.layer(*args, **kwargs)
        first = values[self.inputs[0]]
        if isinstance(first, SparseTensor) and isinstance(made, torch.Tensor) and len(made) == len(first.features):
            return first.with_features(made)
        return made


def pooling_plan(layer: Any, x: SparseTensor, values: Values, where: dict[str, int]) -> ConvolutionPlan:
    """The plan of a pooling layer, down or back up."""
    if "onto" in where:
        return layer._back(x, values[where["onto"]], None)
    target = values[where["target"]].grid if "target" in where else None
    if isinstance(layer, FloorAvgPool):
        target = coarsened(x.grid, layer.geometry.stride[0])
    return layer._down(x, target, None)


def on_features(x: Any, function: Any) -> Any:
    """A function of features, on a sparse or a plain tensor."""
    return placed(x, function(features_in(x)))


def features_in(x: Any) -> torch.Tensor:
    return x.features if isinstance(x, SparseTensor) else x


def placed(x: Any, features: torch.Tensor) -> Any:
    return x.with_features(features) if isinstance(x, SparseTensor) else features


def shell(layer: torch.nn.Module) -> torch.nn.Module:
    """A layer without its parameters and hooks: what finds its plans."""
    shell = copy.copy(layer)
    shell.__dict__ = {**shell.__dict__, "_parameters": dict.fromkeys(layer._parameters)}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        shell.__dict__[name] = type(shell.__dict__[name])()
    return shell


def fixed(numbers: torch.Tensor) -> torch.Tensor:
    """Integers, and fp32 numbers as the integers of their bits: `half()` and `to(dtype)` leave both alone."""
    return numbers.to(torch.float32).contiguous().view(torch.int32) if numbers.is_floating_point() else numbers


def number(bits: Any) -> torch.Tensor:
    return bits.view(torch.float32)
