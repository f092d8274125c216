"""What a network does to a scene, step by step: how each step is run, and what it needs to be right in a box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.window import Window
from sparseconv.ops import pooling
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.shared import shared_plan
from sparseconv.plan.within import plan_within
from sparseconv.tensor import SparseTensor
from sparseconv.trace.boxes import Scale, seen, union

Box = IndexRange
Kind = TypeVar("Kind")


class Wants:
    """The box in which each value must be right, by the number of its step; what nobody wants is not there."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps, self.boxes = steps, {}  # type: Sequence[Step], dict[int, Box]

    def add(self, number: int, box: Box | None) -> None:
        both = union(self.boxes.get(number), box)
        if both is not None:
            self.boxes[number] = both

    def spread(self, known: frozenset[int] = frozenset()) -> dict[int, Box]:
        """From what is wanted to all that it takes, last step first; a ``known`` value takes its voxels alone."""
        for step in reversed(self.steps):
            box = self.boxes.get(step.number)
            if box is None:
                continue
            if step.place is not None:
                self.add(step.place, box)
            if step.number not in known:
                step.demand(box, self)
        return self.boxes


#: autocast of each kind of device: its dtype, and whether it is on
Casts = tuple[tuple[str, torch.dtype, bool], ...]
#: whether gradients are on, and autocast
Modes = tuple[bool, Casts]


def modes_now() -> Modes:
    """Those that a network may change on its way."""
    casts = ((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), tuple(casts)


@contextmanager
def casting(casts: Casts) -> Iterator[None]:
    """Autocast as it was where `modes_now` said so."""
    with ExitStack() as stack:
        for now, then in zip(modes_now()[1], casts):
            if now != then:
                stack.enter_context(torch.autocast(*then))
        yield


@dataclass(kw_only=True)
class Step:
    """One value of a network: a grid, a plan, rows of features, or a tensor of the whole scene.

    ``place`` is the step of the grid whose voxels the rows stand for; None for what has no rows.
    """

    number: int = -1
    where: str = ""  # the module that was running, in words
    module: str = ""  # and by its name in the network
    place: int | None = None
    channels: tuple[int, ...] = ()  # sizes of a row
    dtype: torch.dtype | None = None
    modes: Modes | None = None  # where they were others than around the network
    reads: ClassVar[tuple[str, ...]] = ()  # attributes that name a step, or None

    def value(self, values: Any) -> Any:
        """What `run` returns, in the modes that the network set for this step."""
        if self.modes is None:
            return self.run(values)
        grads, casts = self.modes
        with torch.set_grad_enabled(grads and torch.is_grad_enabled()), casting(casts):
            return self.run(values)

    @property
    def uses(self) -> tuple[int, ...]:
        """Steps whose values `run` reads."""
        named = (getattr(self, name) for name in self.reads)
        return tuple(number for number in named if number is not None)

    @property
    def is_rows(self) -> bool:
        return self.place is not None

    def demand(self, box: Box, wants: Wants) -> None:
        """Say what must be right where, so that this value is right in ``box``."""

    def run(self, values: Any) -> Any:
        """The value, from those of earlier steps."""
        raise NotImplementedError


# ---- geometry


@dataclass(kw_only=True)
class GridStep(Step):
    """A set of voxels; ``scale`` is the edge of one of them in voxels of the input."""

    scale: Scale = ()


@dataclass(kw_only=True)
class InputGrid(GridStep):
    """The scene's own voxels."""

    def run(self, values: Any) -> VoxelGrid:
        raise NotImplementedError("the input is given")


@dataclass(kw_only=True)
class PlanStep(Step):
    """A plan on the grid ``source``: of ``options``, or `transpose` of the plan ``of``."""

    source: int
    target: int | None  # the grid that it leads to, where it was there before the plan
    window: Window
    is_transposed: bool
    options: dict[str, Any] = field(default_factory=dict)
    of: int | None = None
    reads = ("source", "target", "of")

    def sees(self, box: Box | None) -> Box | None:
        return seen(box, self.window, self.is_transposed)

    def run(self, values: Any) -> ConvolutionPlan:
        if self.of is not None:
            return values[self.of].transpose()
        grid, options = values[self.source], dict(self.options)
        if "shape" in options:
            return plan_within(grid, options.pop("shape"), options.pop("kernel_size"), **options)
        if self.target is not None and self.target != self.source:
            options["target"] = values[self.target]
        return shared_plan(grid, **options)


@dataclass(kw_only=True)
class TargetGrid(GridStep):
    """The voxels that a plan reaches: right where the inputs are right that its outputs see."""

    plan: int
    same: bool  # some of the source's own voxels
    reads = ("plan",)

    def demand(self, box: Box, wants: Wants) -> None:
        plan: Any = wants.steps[self.plan]
        wants.add(plan.source, plan.sees(box))
        if self.same:
            wants.add(plan.source, box)

    def run(self, values: Any) -> VoxelGrid:
        return values[self.plan].target


@dataclass(kw_only=True)
class MadeGrid(GridStep):
    """Voxels that ``VoxelGrid.coarsen``, ``refine`` or ``dilate`` make; ``window`` says of which ones each."""

    of: int
    method: str
    amount: Any
    window: Window
    is_transposed: bool
    reads = ("of",)

    def demand(self, box: Box, wants: Wants) -> None:
        wants.add(self.of, seen(box, self.window, self.is_transposed))

    def run(self, values: Any) -> VoxelGrid:
        return getattr(values[self.of], self.method)(self.amount)


@dataclass(kw_only=True)
class Masked(Step):
    """What a mask keeps of something, voxel by voxel."""

    of: int
    mask: int
    reads = ("of", "mask")

    def demand(self, box: Box, wants: Wants) -> None:
        wants.add(self.of, box)
        wants.add(self.mask, box)


@dataclass(kw_only=True)
class SubsetGrid(Masked, GridStep):
    """The voxels of a grid that a mask keeps."""

    def run(self, values: Any) -> VoxelGrid:
        return values[self.of].subset(values[self.mask])


# ---- rows


@dataclass(kw_only=True)
class InputRows(Step):
    """The scene's own features."""

    def run(self, values: Any) -> torch.Tensor:
        raise NotImplementedError("the input is given")


@dataclass(kw_only=True)
class Coords(Step):
    """Where the voxels of a grid lie, as rows."""

    reads = ("place",)

    def run(self, values: Any) -> torch.Tensor:
        return values[self.place].coords


@dataclass(frozen=True)
class Ref:
    """An earlier value among the arguments of a call."""

    number: int


def mapped(given: Any, kind: type[Kind] | tuple[type[Any], ...], change: Callable[[Any], Any]) -> Any:
    """Lists, tuples and dicts of arguments with something else in the place of those of a kind."""
    if isinstance(given, kind):
        return change(given)
    if isinstance(given, (list, tuple)):
        made = [mapped(one, kind, change) for one in given]
        return made if isinstance(given, list) else type(given)(*made) if hasattr(given, "_fields") else tuple(made)
    if isinstance(given, dict):
        return {key: mapped(one, kind, change) for key, one in given.items()}
    return given


def parts_of(given: Any, kind: type[Kind]) -> list[Kind]:
    """The arguments of a kind, in their order."""
    found: list[Kind] = []
    mapped(given, kind, found.append)
    return found


@dataclass(frozen=True)
class SparseRef(Ref):
    """A sparse tensor among the arguments of a layer: rows ``number`` on the grid ``grid``."""

    grid: int


def filled(given: Any, values: Any) -> Any:
    """Arguments with values in the place of their references."""

    def value(ref: Ref) -> Any:
        made = values[ref.number]
        return SparseTensor(values[ref.grid], made) if isinstance(ref, SparseRef) else made

    return mapped(given, Ref, value)


def references(given: Any) -> tuple[int, ...]:
    """The steps that arguments refer to, each once."""
    found: list[int] = []
    for ref in parts_of(given, Ref):
        found += [ref.number, ref.grid] if isinstance(ref, SparseRef) else [ref.number]
    return tuple(dict.fromkeys(found))


@dataclass(kw_only=True)
class Call(Step):
    """A function of torch that makes each row of one row, or, without a place, one tensor of the whole scene."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: tuple[int, ...] = ()  # those of its arguments that have rows
    pads: bool = False  # whether a product of few rows is summed in another order

    @property
    def uses(self) -> tuple[int, ...]:
        return references((self.args, self.kwargs))

    def demand(self, box: Box, wants: Wants) -> None:
        for number in self.rows:
            wants.add(number, box)

    def run(self, values: Any) -> Any:
        args, kwargs = filled((self.args, self.kwargs), values)
        few = LEAST_ROWS - len(args[0]) if self.pads else 0
        if few > 0:
            args = (torch.nn.functional.pad(args[0], (0, 0, 0, few)), *args[1:])
        made = self.function(*args, **kwargs)
        return made[:-few] if few > 0 else made


@dataclass(kw_only=True)
class Layer(Step):
    """A module that is called as a whole; its value is what it returns: a sparse tensor, or rows."""

    layer: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def uses(self) -> tuple[int, ...]:
        return references((self.args, self.kwargs))

    def run(self, values: Any) -> Any:
        args, kwargs = filled((self.args, self.kwargs), values)
        return self.layer(*args, **kwargs)


@dataclass(kw_only=True)
class LayerGrid(GridStep):
    """The voxels that a layer's sparse tensor lies on, where no step before has them."""

    of: int
    reads = ("of",)

    def run(self, values: Any) -> VoxelGrid:
        return values[self.of].grid


@dataclass(kw_only=True)
class LayerRows(Step):
    """The features that a layer returns."""

    of: int
    reads = ("of",)

    def run(self, values: Any) -> torch.Tensor:
        made = values[self.of]
        return made.features if isinstance(made, SparseTensor) else made


#: rows below which a BLAS sums a product of matrices in another order than above
LEAST_ROWS = 64


@dataclass(kw_only=True)
class Pick(Step):
    """One of several results of a call."""

    of: int
    at: int
    reads = ("of",)

    def demand(self, box: Box, wants: Wants) -> None:
        wants.add(self.of, box)

    def run(self, values: Any) -> Any:
        return values[self.of][self.at]


@dataclass(kw_only=True)
class Kept(Masked):
    """The rows of a grid that are left in a `SubsetGrid`."""

    def run(self, values: Any) -> torch.Tensor:
        return values[self.of][values[self.mask]]


@dataclass(kw_only=True)
class OverEdges(Step):
    """What an output makes of the inputs that it sees: a convolution or a pooling over a plan."""

    plan: int
    x: int
    kind: str  # "convolve", "sum", "average", "average_of_taps", "max", "max_unpool"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    groups: int = 1

    @property
    def uses(self) -> tuple[int, ...]:
        return (self.plan, self.x, *references((self.args, self.kwargs)))

    def demand(self, box: Box, wants: Wants) -> None:
        plan: Any = wants.steps[self.plan]
        inputs = plan.sees(box)
        wants.add(self.x, inputs)
        wants.add(plan.source, inputs)
        for number in references((self.args, self.kwargs)):
            wants.add(number, inputs if self.kind == "max_unpool" else box)

    def run(self, values: Any) -> Any:
        plan, x = values[self.plan].with_groups(self.groups), values[self.x]
        args, kwargs = filled((self.args, self.kwargs), values)
        if self.kind == "convolve":
            return plan.execute(x, *args, **kwargs)
        if self.kind == "sum":
            return pooling.sum_pool(x, plan)
        if self.kind == "max":
            return pooling.max_pool(x, plan)
        if self.kind == "max_unpool":
            return pooling.max_unpool(x, args[0], plan)
        return pooling.avg_pool(x, plan, count_absent=self.kind == "average_of_taps")
