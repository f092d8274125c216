"""From a recording to the steps of an integer network: what is joined, on which scale each value lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sparseconv.backends.integers import LARGEST, NARROW_MULTIPLIERS
from sparseconv.nn.fused.fusion import folded
from sparseconv.quantization import layers
from sparseconv.quantization.recording import Operation, Recording, Ref, filled, refs_in
from sparseconv.quantization.scales import integer_weight, rescale_to, rounding_of, shift_for


@dataclass
class Joined:
    """Operations that become one step: a convolution, the norm, the residual and the activation after it."""

    first: Operation
    output: int
    norm: Any = None
    residual: int | None = None
    slope: float | None = None
    rest: list[Operation] = field(default_factory=list)


def joined(recording: Recording) -> list[Joined]:
    """The operations in an order in which each has what it takes, those that follow a convolution joined to it."""
    operations, results = recording.operations, {ref.value for ref in refs_in(recording.results)}
    uses: dict[int, list[Operation]] = {}
    for op in operations:
        for value in op.inputs:
            uses.setdefault(value, []).append(op)
    at = {id(op): place for place, op in enumerate(operations)}
    taken: set[int] = set()
    made: list[tuple[int, Joined]] = []
    for place, op in enumerate(operations):
        if id(op) in taken or op.kind == "same":
            continue
        group = Joined(op, op.output)
        while True:
            after = uses.get(group.output, [])
            if len(after) != 1 or group.output in results or id(after[0]) in taken:
                break
            then = after[0]
            if then.kind == "same":
                pass
            elif then.kind == "norm" and op.kind in ("conv", "linear") and not (group.norm or group.slope is not None):
                if group.residual is not None:
                    break
                group.norm = then.module
            elif then.kind == "add" and op.kind in ("conv", "linear", "norm") and group.residual is None:
                if group.slope is not None or then.inputs[0] == then.inputs[1] or op.kind == "norm":
                    break
                group.residual = next(value for value in then.inputs if value != group.output)
            elif then.kind == "act" and op.kind in ("conv", "linear", "norm", "add") and group.slope is None:
                slope = slope_of(then)
                if slope is None:
                    break
                group.slope = slope
            else:
                break
            taken.add(id(then))
            group.rest.append(then)
            group.output = then.output
            place = at[id(then)]
        made.append((place, group))
    return [group for _, group in sorted(made, key=lambda pair: pair[0])]


def slope_of(op: Operation) -> float | None:
    """Of an activation with two straight halves, the slope of the lower one, 0 to 1; else None."""
    slope = getattr(op.module, "negative_slope", op.slope)
    return float(slope) if 0 <= slope <= 1 else None


class Builder:
    """Makes the steps. Values have numbers in the recording; a step's are their slots, one for each form of a value."""

    largest: float = LARGEST  # what a value's range is brought to
    #: ranges that differ by no more share a scale where they are put side by side: then nothing is rescaled
    alike = 2.0

    def __init__(self, recording: Recording, ranges: dict[int, float]) -> None:
        self.recording, self.ranges = recording, ranges
        self.steps: list[layers.Step] = []
        self.slots: dict[tuple[int, str], int] = {(0, "wide"): 0}
        self.count = 1
        self.groups = joined(recording)
        inside = {op.output for group in self.groups for op in group.rest}
        alone = [op for op in recording.operations if op.kind == "same" and op.output not in inside]
        self.same = {op.output: op.inputs[0] for op in alone}
        self.ends = {op.output: group.output for group in self.groups for op in (group.first, *group.rest)}
        self.scales = self._scales()
        self.failed: dict[str, str] = {}

    # ---- scales

    def _scales(self) -> dict[int, float]:
        """The scale of each value; of those that share one, the largest."""
        leader: dict[int, int] = {}

        def find(value: int) -> int:
            while leader.get(value, value) != value:
                value = leader[value]
            return value

        for output, source in self.same.items():
            leader[output] = source
        range_of = {v: r for v, r in self.ranges.items()}
        for group in self.groups:
            op, output = group.first, find(group.output)
            if op.kind == "max":
                sources = [find(op.inputs[0])]
            elif op.kind == "cat":
                sources = [find(value) for value in op.inputs]
                largest = max(range_of[s] for s in sources)
                sources = [s for s in sources if range_of[s] * self.alike >= largest]
            else:
                continue
            for value in sources:
                value, output = find(value), find(group.output)
                if value != output:
                    leader[output] = value
                    range_of[value] = max(range_of[value], range_of[output])
        return {value: (range_of[find(value)] / self.largest) or 1.0 for value in self.ranges}

    # ---- values

    def source(self, value: int) -> int:
        while value in self.same:
            value = self.same[value]
        return value

    def slot(self, value: int, form: str) -> int:
        """A new slot for a form (``int8``, ``sums`` or ``wide``) of a value."""
        self.slots[value, form] = self.count
        self.count += 1
        return self.count - 1

    def slot_of(self, value: int, form: str, name: str) -> int:
        """The slot of a value in a form, made of another one where it is not there."""
        value = self.source(value)
        if (value, form) not in self.slots:
            if form == "int8":
                source = self.slots[value, "wide"]
                self.steps.append(self.quantizer(name, [source], self.slot(value, form), self.scales[value]))
            else:
                source, scale = self.slots[value, "int8"], torch.tensor([self.scales[value]])
                self.steps.append(layers.Dequantize(name, [source], self.slot(value, form), scale))
        return self.slots[value, form]

    def voxels(self, value: int) -> int:
        """A slot that lies on a value's voxels."""
        value = self.source(self.ends.get(value, value))
        return next(slot for (known, _), slot in self.slots.items() if known == value)

    # ---- steps

    def build(self) -> Any:
        """The steps, and what the network returns with slots in the place of values; names of layers that failed."""
        results = {self.source(ref.value) for ref in refs_in(self.recording.results)}
        wide = {self.source(v) for g in self.groups if g.first.kind == "wide" for v in g.first.inputs}
        narrow = {self.source(v) for g in self.groups if g.first.kind != "wide" for v in g.first.inputs}
        narrow |= {self.source(g.residual) for g in self.groups if g.residual is not None}
        for group in self.groups:
            leaves = self.source(group.output) in (results | wide) - narrow
            try:
                self._step(group, leaves)
            except ValueError as error:
                self.failed[group.first.name] = str(error)
                self.slot(group.output, "int8")
        return self._wide(self.recording.results, "result")

    def _wide(self, tree: Any, name: str) -> Any:
        """A tree with the slots of its values in floating point in their place."""
        return filled(tree, lambda ref: Ref(self.slot_of(ref.value, "wide", name), ref.is_sparse))

    def _step(self, group: Joined, leaves: bool) -> None:
        op = group.first
        if op.kind == "wide":
            call = self._wide(op.call, op.name)
            inputs = [ref.value for ref in refs_in(call)]
            self.steps.append(layers.Wide(op.name, inputs, self.slot(group.output, "wide"), op.module, call))
            return
        if op.kind in ("unknown", "act") and (op.kind == "unknown" or slope_of(op) is None):
            raise ValueError(f"{op.name.rpartition(':')[2] or 'it'} has no integer form")
        inputs = [self.slot_of(value, "int8", op.name) for value in op.inputs]
        where = {name: self.voxels(value) for name, value in op.where.items()}
        if op.kind in ("conv", "linear"):
            self._convolution(group, inputs, where, leaves)
        else:
            self._other(group, inputs, where)

    #: the steps, and the functions, that there are for each kind of 8 bits
    quantizer: Any = layers.Quantize
    convolution: Any = layers.IntegerConvolution
    _narrow = staticmethod(integer_weight)
    _rescale: Any = staticmethod(rescale_to)

    def _other(self, group: Joined, inputs: list[int], where: dict[str, int]) -> None:
        op, y_scale = group.first, self.scales[group.output]
        if op.kind == "norm":
            self._norm(group, inputs)
        elif op.kind == "max":
            output = self.slot(group.output, "int8")
            self.steps.append(layers.MaxPooling(op.name, inputs, output, op.module, where))
        elif op.kind in ("sum", "average"):
            self._sum(group, inputs, where)
        else:
            ratios = [self.scales[self.source(value)] / y_scale for value in op.inputs]
            shift = shift_for(ratios, NARROW_MULTIPLIERS, 21)
            slope = slope_of(op) if op.kind == "act" else group.slope
            multipliers = [round(ratio * 2.0**shift) for ratio in ratios]
            rounding = rounding_of(slope)
            output = self.slot(group.output, "int8")
            self.steps.append(
                layers.Combine(op.name, inputs, output, multipliers, shift, *rounding, concatenates=op.kind == "cat")
            )

    def _convolution(self, group: Joined, inputs: list[int], where: dict[str, int], leaves: bool) -> None:
        op = group.first
        x_scale = self.scales[self.source(op.inputs[0])]
        weight, bias = folded_weight(group)
        narrow, added, scale = self._narrow(weight, bias, x_scale)
        rescale, form = None, "sums"
        if not (leaves and group.residual is None and group.slope is None):
            residual_scale = 0.0
            if group.residual is not None:
                residual_scale = self.scales[self.source(group.residual)]
                inputs = [*inputs, self.slot_of(group.residual, "int8", op.name)]
            rescale, form = self._rescale(scale, self.scales[group.output], residual_scale, group.slope), "int8"
        output = self.slot(group.output, form)
        self.steps.append(self.convolution(op.name, inputs, output, op.module, narrow, added, rescale, where))
        if form == "sums":
            self.steps.append(layers.Dequantize(op.name, [output], self.slot(group.output, "wide"), scale))

    def _norm(self, group: Joined, inputs: list[int]) -> None:
        op = group.first
        weight, bias = folded_norm(op.module)
        x_scale = self.scales[self.source(op.inputs[0])]
        steps = (weight.abs() / 32767).clamp_min(1e-30)
        steps = torch.maximum(steps, bias.abs() / (x_scale * 2**30))
        rescale = rescale_to(steps * x_scale, self.scales[group.output], 0.0, group.slope)
        integers = (weight / steps).round().to(torch.int32)
        added = (bias / (steps * x_scale)).round().to(torch.int32)
        self.steps.append(layers.Affine(op.name, inputs, self.slot(group.output, "int8"), integers, added, rescale))

    def _sum(self, group: Joined, inputs: list[int], where: dict[str, int]) -> None:
        op, module = group.first, group.first.module
        taps = module.geometry.num_taps
        ratio = self.scales[self.source(op.inputs[0])] / self.scales[group.output]
        counts = [1] * (taps + 1)
        if op.kind == "average":
            counts = [taps] * (taps + 1) if getattr(module, "count_absent", False) else [1, *range(1, taps + 1)]
        ratios = [ratio / count for count in counts]
        shift = shift_for(ratios, NARROW_MULTIPLIERS, 62)
        numbers = torch.tensor([round(r * 2.0**shift) for r in ratios], dtype=torch.int32)
        output = self.slot(group.output, "int8")
        self.steps.append(layers.SumPooling(op.name, inputs, output, module, where, numbers, shift))


def folded_weight(group: Joined) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (K, C_in/G, C_out) and bias of a convolution or linear layer, with the norm after it in them."""
    module = group.first.module
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    if group.first.kind == "linear":
        weight = weight.T[None]
    if group.norm is None:
        return weight, bias
    return folded(weight.double(), None if bias is None else bias.double(), wide(group.norm), torch.float64)


def folded_norm(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift (C,) of a norm in fp64, its running statistics in them."""
    norm = wide(norm)
    weight, bias = folded(torch.ones_like(norm.running_mean)[None, None], None, norm, torch.float64)
    return weight[0, 0], bias


def wide(norm: Any) -> Any:
    """A norm's numbers in fp64. Raises ValueError where it keeps no running statistics."""
    if norm.running_mean is None:
        raise ValueError(f"{type(norm).__name__} keeps no running statistics")
    held = {name: getattr(norm, name) for name in ("weight", "bias", "running_mean", "running_var")}
    return SimpleNamespace(eps=norm.eps, **{k: None if t is None else t.detach().double() for k, t in held.items()})
