"""What a network does to a scene, layer by layer: recorded while it runs, so that its forward may be any Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


@dataclass
class Recording:
    """The operations of one run in their order; ``values`` counts the values, 0 being the network's input."""

    operations: list[Operation] = field(default_factory=list)
    values: int = 1
    results: Any = None  # what the network returned, with `Ref`s

    @property
    def shape(self) -> list[tuple[Any, ...]]:
        """What every scene must have in common: the operations, what wide layers are given and what is returned."""
        plain = (Ref, bool, int, float, str)
        trees = [*((op.kind, op.name, op.inputs, op.output, op.call) for op in self.operations), self.results]
        return [tuple(v if isinstance(v, plain) else type(v) for v in pytree.tree_leaves(tree)) for tree in trees]


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


def record(
    net: torch.nn.Module, x: SparseTensor, wide: Iterable[str], seen: Callable[[int, torch.Tensor], None]
) -> Recording:
    """Run ``net`` on ``x`` and record it; layers named in ``wide`` are not looked into.

    ``seen`` is called with the number and the features of every value.
    """
    recorder = _Recorder(net, set(wide), seen)
    with ExitStack() as stack:
        for name, module in net.named_modules():
            recorder.watch(name, module, stack)
        recorder.new(x)
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        said = "the network returns", "that no layer of it is seen to make"
        recorder.recording.results = recorder.referred(net(x), said)
    return recorder.recording


class _Recorder(TorchFunctionMode):
    def __init__(self, net: torch.nn.Module, wide: set[str], seen: Callable[[int, torch.Tensor], None]) -> None:
        super().__init__()
        self.constants = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
        self.recording, self.wide, self.seen = Recording(values=0), wide, seen
        self.numbers: dict[int, int] = {}  # by the identity of a tensor of features
        self.grids: dict[int, int] = {}  # a value on each grid
        self.places: dict[int, VoxelGrid] = {}  # the grid of each value
        self.held: list[Any] = []  # so that no identity is given twice
        self.depth, self.path = 0, [""]

    # ---- values

    def new(self, x: Any, like: int = -1) -> int:
        """The number of a value that was just made; a plain tensor lies on the voxels of the value ``like``."""
        features = x.features if isinstance(x, SparseTensor) else x
        number = self.numbers[id(features)] = self.recording.values
        self.recording.values += 1
        self.held.append(features)
        if isinstance(x, SparseTensor):
            self.grids.setdefault(id(x.grid), number)
            self.held.append(x.grid)
        place = x.grid if isinstance(x, SparseTensor) else self.places.get(like)
        if place is not None and len(place) == len(features):
            self.places[number] = place
        self.depth += 1  # what it calls is none of the network's
        self.seen(number, features)
        self.depth -= 1
        return number

    def number(self, x: Any) -> int | None:
        features = x.features if isinstance(x, SparseTensor) else x
        found = self.numbers.get(id(features)) if isinstance(features, torch.Tensor) else None
        if found is not None and isinstance(x, SparseTensor):
            place = self.places.get(found)
            if place is not x.grid and (place is None or not torch.equal(place.coords, x.grid.coords)):
                raise ValueError("features are put on other voxels than their own: do it in a module that keep names")
        return found

    def referred(self, tree: Any, said: tuple[str, str], constants: Collection[int] = ()) -> Any:
        """A tree with `Ref`s in the place of known tensors. Raises ValueError for others of a scene, named between what
        is ``said``."""

        def of(leaf: Any) -> Any:
            number = self.number(leaf)
            if number is None and isinstance(leaf, OF_A_SCENE) and id(leaf) not in constants:
                raise ValueError(f"{said[0]} a {type(leaf).__name__} {said[1]}")
            return leaf if number is None else Ref(number, isinstance(leaf, SparseTensor))

        return pytree.tree_map(of, tree, is_leaf=lambda leaf: isinstance(leaf, SparseTensor))

    # ---- layers

    def watch(self, name: str, module: torch.nn.Module, stack: ExitStack) -> None:
        """Record a layer when it runs, or keep the path to what runs within."""
        kind = "wide" if name in self.wide and name else kind_of(module)

        def before(module: Any, args: Any, kwargs: Any) -> None:
            self.path.append(name)
            self.depth += kind is not None

        def after(module: Any, args: Any, kwargs: Any, result: Any) -> None:
            self.path.pop()
            self.depth -= kind is not None
            if kind is not None and not self.depth:
                self.layer(kind, name, module, args, kwargs, result)

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def layer(self, kind: str, name: str, module: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if not isinstance(result, (torch.Tensor, SparseTensor)):
            raise ValueError(f"{name} returns {type(result).__name__}; recorded layers return one tensor")
        if kind == "wide":
            words = "of the scene that no layer is seen to make: pass sparse tensors, or keep what makes it"
            tree = self.referred((args, kwargs), (f"{name} is called with", words), self.constants)
            self.add(kind, name, tuple(ref.value for ref in refs_in(tree)), result, module, call=tree)
            return
        given = {**dict(zip(("input", "onto" if len(args) > 1 else ""), args)), **kwargs}
        x = given.pop("input", given.pop("x", None))
        number = self.number(x)
        if number is None:
            raise ValueError(f"{name} takes a tensor that no layer is seen to make: keep the module that makes it wide")
        where = {}
        for key, value in given.items():
            if value is None:
                continue
            grid = value.grid if isinstance(value, SparseTensor) else value
            if key not in ("onto", "target") or not isinstance(grid, VoxelGrid) or id(grid) not in self.grids:
                raise ValueError(f"{name} is called with {key}={type(value).__name__}, which no layer is seen to make")
            where[key] = self.grids[id(grid)]
        self.add(kind, name, (number,), result, module, where=where)

    def add(self, kind: str, name: str, inputs: tuple[int, ...], result: Any, module: Any = None, **more: Any) -> None:
        output = self.new(result, *inputs[:1])
        self.recording.operations.append(Operation(kind, name, inputs, output, module, **more))

    # ---- functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.depth or not (isinstance(result, (torch.Tensor, SparseTensor)) or func is torch.Tensor.__setitem__):
            return result
        made = args[0] if result is None else result  # an assignment to rows changes what it is given
        given = [*args, *kwargs.values()]
        flat = [part for value in given for part in (value if isinstance(value, (list, tuple)) else (value,))]
        inputs = tuple(number for number in (self.number(part) for part in flat) if number is not None)
        if inputs and made.dtype.is_floating_point:
            kind, slope = self._kind(func, args, kwargs, flat, len(inputs))
            self.add(kind, f"{self.path[-1]}:{func.__name__}", inputs, made, slope=slope)
        return result

    def _kind(self, func: Any, args: tuple, kwargs: dict, flat: list[Any], inputs: int) -> tuple[str, float]:
        kind = FUNCTIONS.get(getattr(func, "__name__", ""), "unknown")
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01) if "leaky" in func.__name__ else 0.0
        if kind == "add" and (inputs != 2 or kwargs.get("alpha", 1) != 1 or flat[0].shape != flat[1].shape):
            kind = "unknown"
        parts, dim = kwargs.get("tensors", args[0] if args else ()), args[1] if len(args) > 1 else 0
        if kind == "cat" and (inputs != len(parts) or kwargs.get("dim", kwargs.get("axis", dim)) not in (1, -1)):
            kind = "unknown"
        return kind, float(slope)
