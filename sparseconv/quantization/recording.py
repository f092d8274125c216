"""The operations of a recorded network that have an integer form, and those that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.nn import pooling
from sparseconv.nn.convolution import Conv, ConvTranspose, InverseConv, SubmanifoldConv
from sparseconv.nn.models.resnet import FloorAvgPool
from sparseconv.nn.models.second import ConvWithin
from sparseconv.nn.module import FeatureModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree
from sparseconv.trace import program
from sparseconv.trace.samples import leaves_of, number_of_leaf, recorded

#: forwards of the convolutions that there are: a class of the user's may override all else
CONVOLUTIONS = {kind.forward for kind in (SubmanifoldConv, Conv, InverseConv, ConvTranspose, ConvWithin)}
#: kinds of layers by the forward that makes them so
FORWARDS: dict[Any, str] = {
    torch.nn.Linear.forward: "linear",
    torch.nn.BatchNorm1d.forward: "norm",
    BatchNorm.forward: "norm",
    torch.nn.ReLU.forward: "act",
    torch.nn.LeakyReLU.forward: "act",
    torch.nn.Dropout.forward: "same",
    torch.nn.Identity.forward: "same",
    pooling.MaxPool.forward: "max",
    pooling.SumPool.forward: "sum",
    pooling.AvgPool.forward: "average",
    FloorAvgPool.forward: "average",
    pooling.Unpool.forward: "average",
} | dict.fromkeys(CONVOLUTIONS, "conv")
#: functions of tensors outside of layers
FUNCTIONS = {"add": "add", "__add__": "add", "__radd__": "add", "cat": "cat", "concat": "cat", "relu": "act",
             "leaky_relu": "act", "contiguous": "same", "detach": "same", "float": "same"}  # fmt: skip
#: what belongs to one scene: none may stay in a network for others
OF_A_SCENE = (torch.Tensor, SparseTensor, VoxelGrid, ConvolutionPlan)
#: steps that make no value of the network
SILENT = (program.GridStep, program.PlanStep, program.Layer, program.Coords, program.InputRows)


@dataclass(frozen=True)
class Ref:
    """A value of a recording by its number, in the place of the tensor."""

    value: int
    is_sparse: bool


@dataclass
class Operation:
    """One layer or function: which values it takes and makes."""

    kind: str  # conv, linear, norm, act, add, cat, max, sum, average, same, wide, or unknown
    name: str  # the layer's path, or that of the module whose forward calls the function
    inputs: tuple[int, ...]
    output: int
    module: Any = None
    slope: float = 0.0  # of a function that is an activation
    where: dict[str, int] = field(default_factory=dict)  # the values whose voxels the call named
    call: Any = None  # (args, kwargs) with `Ref`s, of a wide layer


def refs_in(tree: Any) -> list[Ref]:
    """The `Ref`s of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Ref)]


def filled(tree: Any, value_of: Callable[[Ref], Any]) -> Any:
    """A tree with something else in the place of its `Ref`s."""
    return pytree.tree_map(lambda leaf: value_of(leaf) if isinstance(leaf, Ref) else leaf, tree)


def kind_of(module: torch.nn.Module) -> str | None:
    """What a layer is to integers; None for a module that is looked into."""
    forward: Any = type(module).forward
    if forward is FeatureModule.forward:  # which calls torch's
        own = [base.__dict__.get("forward") for base in type(module).__mro__]
        forward = next(found for found in own if found not in (None, FeatureModule.forward))
    return FORWARDS.get(forward)


class Recording:
    """The operations of a network in their order, and what it returns, with `Ref`s; value 0 is the network's input.

    Layers named in ``wide`` are not looked into. ``like`` is a scene of the rank, channels, dtype and device at hand.
    """

    def __init__(self, net: torch.nn.Module, like: SparseTensor, wide: Iterable[str]) -> None:
        self.wide = set(wide) - {""}
        kinds = (like.grid, like.channels, like.dtype, like.features.device)
        try:
            trace, returned, _ = recorded(
                net, *kinds, lambda name, layer: name in self.wide or kind_of(layer) is not None, "quantized"
            )
        except ValueError as error:
            raise ValueError(f"{error}. Or make a module of it and name that in keep") from error
        self.steps, self._sizes = trace.steps, [getattr(value, "shape", None) for value in trace.values]
        self.constants = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
        self.operations: list[Operation] = []
        self.numbers = {1: 0}  # values by the steps that make them
        self.on_grid = {0: 0}  # a value on each grid
        for step in self.steps:
            if not isinstance(step, SILENT):
                self._add(step)
        leaves, layout = leaves_of(returned)
        made = [leaf if number_of_leaf(leaf) is None else self._ref(leaf) for leaf in leaves]
        self.results = pytree.tree_unflatten(made, layout)

    def _ref(self, leaf: Any) -> Ref:
        number: Any = number_of_leaf(leaf)
        if number not in self.numbers:
            raise ValueError("the network returns a tensor that no recorded layer made")
        return Ref(self.numbers[number], isinstance(leaf, SparseTensor))

    def run(self, x: SparseTensor, seen: Callable[[int, torch.Tensor], None]) -> None:
        """Run the network on a scene; ``seen`` is called with the number and the features of every value."""
        values: dict[int, Any] = {0: x.grid, 1: x.features}
        for step in self.steps:
            if step.number not in values:
                values[step.number] = step.value(values)
            if step.number in self.numbers and isinstance(values[step.number], torch.Tensor):
                seen(self.numbers[step.number], values[step.number])

    def _add(self, step: program.Step) -> None:
        layer: Any = self.steps[step.of] if isinstance(step, program.LayerRows) else None
        inputs = tuple(self.numbers[n] for n in step.uses if n in self.numbers)
        if layer is None and step.dtype is not None and not step.dtype.is_floating_point:
            return
        output = self.numbers[step.number] = len(self.numbers)
        if layer is not None and layer.module in self.wide:
            call = self._call(layer)
            inputs = tuple(ref.value for ref in refs_in(call))
            made = Operation("wide", layer.module, inputs, output, layer.layer, call=call)
        elif layer is not None:
            made = self._layer(layer, output)
        else:
            function: Any = getattr(step, "function", type(step))
            kind, slope = self._kind(step) if isinstance(step, program.Call) else ("unknown", 0.0)
            made = Operation(kind, f"{step.module}:{function.__name__}", inputs, output, slope=slope)
        self.operations.append(made)
        if step.place is not None:
            self.on_grid.setdefault(step.place, output)

    def _layer(self, step: Any, output: int) -> Operation:
        name = step.module
        given = {**dict(zip(("input", "onto" if len(step.args) > 1 else ""), step.args)), **step.kwargs}
        x = given.pop("input", given.pop("x", None))
        if not isinstance(x, program.Ref) or x.number not in self.numbers:
            raise ValueError(f"{name} takes a tensor that no recorded layer made: keep the module that makes it wide")
        where = {}
        for key, value in given.items():
            if value is None:
                continue
            grid = getattr(value, "grid", getattr(value, "number", None))
            if key not in ("onto", "target") or grid not in self.on_grid:
                raise ValueError(f"{name} is called with {key}={type(value).__name__}, which no recorded layer made")
            where[key] = self.on_grid[grid]
        return Operation(kind_of(step.layer) or "", name, (self.numbers[x.number],), output, step.layer, where=where)

    def _call(self, layer: Any) -> Any:
        """The arguments of a layer with `Ref`s to values; a ValueError where they hold something else of a scene."""

        def of(leaf: Any) -> Any:
            if isinstance(leaf, program.Ref) and leaf.number in self.numbers:
                return Ref(self.numbers[leaf.number], isinstance(leaf, program.SparseRef))
            if isinstance(leaf, program.Ref) or (isinstance(leaf, OF_A_SCENE) and id(leaf) not in self.constants):
                is_grid = isinstance(leaf, program.Ref) and isinstance(self.steps[leaf.number], program.GridStep)
                kind = "VoxelGrid" if is_grid else "Tensor" if isinstance(leaf, program.Ref) else type(leaf).__name__
                raise ValueError(
                    f"{layer.module} is called with a {kind} of the scene that no recorded layer made: pass sparse "
                    "tensors, or keep the module that makes it"
                )
            return leaf

        return pytree.tree_map(of, (layer.args, layer.kwargs))

    def _kind(self, step: program.Call) -> tuple[str, float]:
        name, args, kwargs = step.function.__name__, step.args, step.kwargs
        kind = FUNCTIONS.get(name, "unknown")
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01) if "leaky" in name else 0.0
        refs = program.parts_of((args, kwargs), program.Ref)
        sizes = {self._sizes[ref.number] for ref in refs}
        if kind == "add" and (len(refs) != 2 or kwargs.get("alpha", 1) != 1 or len(sizes) > 1):
            kind = "unknown"
        parts, dim = kwargs.get("tensors", args[0] if args else ()), args[1] if len(args) > 1 else 0
        if kind == "cat" and (len(refs) != len(parts) or kwargs.get("dim", kwargs.get("axis", dim)) not in (1, -1)):
            kind = "unknown"
        return kind, float(slope)
