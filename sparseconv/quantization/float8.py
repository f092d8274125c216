"""The steps of a network in float8 (e4m3), and their builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.backends.base import Request
from sparseconv.backends.float8 import FLOAT8, LARGEST, Float8Rescale
from sparseconv.backends.registry import choose, refusals
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.ops import pooling
from sparseconv.quantization import layers
from sparseconv.quantization.program import Builder, Joined, folded_norm, slope_of
from sparseconv.tensor import SparseTensor


class QuantizeFloat8(layers.Quantize):
    """Floating point -> e4m3: x / scale, rounded to nearest, clipped to 448."""

    def narrowed(self, scaled: torch.Tensor) -> torch.Tensor:
        return narrowed(scaled)


class Float8Convolution(layers.Convolution):
    """A convolution or linear layer, with the norm, residual and activation that followed it.

    ``weight`` has the bytes of e4m3 numbers, as uint8, which `half()` and pickle leave alone.
    """

    def numbers_of(self, rescale: Float8Rescale) -> dict[str, Any]:
        return {"residual": rescale.residual_multiplier, "slope": rescale.slope}

    def convolved(
        self, x: torch.Tensor, kernel_map: KernelMap, groups: int, backend: str, residual: torch.Tensor | None
    ) -> torch.Tensor:
        rescale = None
        if self.numbers:
            multiplier = layers.number(self.multiplier)
            rescale = Float8Rescale(multiplier, self.numbers["residual"], self.numbers["slope"])
        channels = (x.shape[1], self.weight.shape[2])
        request = Request(kernel_map, x.device, FLOAT8, *channels, groups)
        if backend != "triton_implicit_gemm" and all(refusals(request).values()):  # simulated on fp32
            request = Request(kernel_map, x.device, torch.float32, *channels, groups)
        weight, bias = self.weight.view(FLOAT8), layers.number(self.bias)
        return choose(request, backend).float8(x, weight, kernel_map, groups, bias, rescale, residual)


class Float8Function(layers.StepWithNumbers):
    """A sum, a concatenation, an activation, a norm or a pooling layer: on fp32, its result in e4m3."""

    kind = "function"
    extra_state_names = ("scales",)

    def __init__(
        self,
        name: str,
        inputs: Sequence[int],
        output: int,
        operation: str,
        scales: Sequence[float],
        slope: float | None,
        layer: torch.nn.Module | None,
        where: dict[str, int],
    ) -> None:
        super().__init__(name, inputs, output)
        self.operation, self.slope, self.where = operation, slope, dict(where)
        self.layer = None if layer is None or operation == "norm" else layers.shell(layer)
        if operation == "norm":
            gain, shift = folded_norm(layer)
            self.register_buffer("gain", layers.fixed(gain))
            self.register_buffer("shift", layers.fixed(shift))
        self.scales = list(scales)  # of the inputs, then of the output

    def run(self, values: layers.Values) -> Any:
        if self.operation == "cat" and len({*self.scales}) == 1 and self.slope is None:  # bytes side by side
            features = [layers.features_in(values[slot]).view(torch.uint8) for slot in self.inputs]
            return layers.placed(values[self.inputs[0]], torch.cat(features, 1).view(FLOAT8))
        parts = [
            layers.on_features(values[slot], lambda x, scale=scale: x.float() * scale)
            for slot, scale in zip(self.inputs, self.scales)
        ]
        y = self._made(parts, values)
        if self.slope is not None:
            slope = self.slope
            y = layers.on_features(y, lambda x: torch.where(x < 0, x * slope, x))
        return layers.on_features(y, lambda x: narrowed(x / self.scales[-1]))

    def _made(self, parts: list[Any], values: layers.Values) -> Any:
        first = parts[0]
        if self.operation == "cat":
            return layers.placed(first, torch.cat([layers.features_in(part) for part in parts], 1))
        if self.operation == "add":
            return first + parts[1]
        if self.operation == "norm":
            gain, shift = layers.number(self.gain), layers.number(self.shift)
            return layers.on_features(first, lambda x: x * gain + shift)
        if self.operation == "act":
            return first
        plan = layers.pooling_plan(self.layer, first, values, self.where)
        if self.operation == "max":
            return SparseTensor(plan.target, pooling.max_pool(first.features, plan)[0])
        if self.operation == "sum":
            return SparseTensor(plan.target, pooling.sum_pool(first.features, plan))
        absent = getattr(self.layer, "count_absent", False)
        return SparseTensor(plan.target, pooling.avg_pool(first.features, plan, count_absent=absent))


class Float8Builder(Builder):
    """Makes the steps in float8."""

    largest = LARGEST
    #: e4m3 has an exponent: numbers down to a 28,000th of the largest keep all bits
    alike = 64.0
    quantizer = QuantizeFloat8

    convolution = Float8Convolution

    def _narrow(
        self, weight: torch.Tensor, bias: torch.Tensor | None, x_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = weight.double()
        scale = (weight.abs().amax((0, 1)) / LARGEST).clamp_min(1e-30)
        added = torch.zeros_like(scale) if bias is None else bias.double() / (scale * x_scale)
        return narrowed((weight / scale).float()).view(torch.uint8), added.float(), scale * x_scale

    def _rescale(self, scale: torch.Tensor, y_scale: float, residual_scale: float, slope: float | None) -> Any:
        return Float8Rescale((scale / y_scale).float(), residual_scale / y_scale, 1.0 if slope is None else slope)

    def _other(self, group: Joined, inputs: list[int], where: dict[str, int]) -> None:
        op = group.first
        scales = [*(self.scales[self.source(value)] for value in op.inputs), self.scales[group.output]]
        slope = slope_of(op) if op.kind == "act" else group.slope
        output = self.slot(group.output, "int8")
        layer = op.module if op.kind in ("norm", "max", "sum", "average") else None
        self.steps.append(Float8Function(op.name, inputs, output, op.kind, scales, slope, layer, where))


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> e4m3, clipped to its largest number; NaN is 0."""
    return x.clamp(-LARGEST, LARGEST).nan_to_num(0.0).to(FLOAT8)
