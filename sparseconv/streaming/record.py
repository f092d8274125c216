"""A network is run once on a few made-up voxels, and each thing that it does to rows is written down as a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, per_axis
from sparseconv.geometry.window import Window
from sparseconv.plan.arguments import checked_window
from sparseconv.streaming.steps import (
    Call,
    Coords,
    GridStep,
    InputGrid,
    InputRows,
    Kept,
    MadeGrid,
    OverEdges,
    Pick,
    PlanStep,
    Ref,
    Step,
    SubsetGrid,
    TargetGrid,
    boundary_is_local,
    scale_after,
)
from sparseconv.streaming.totals import BatchStatistics, Dense, ItemStatistics, PooledItems, standardised_rows
from sparseconv.streaming.understood import asks, is_product, plain_name, tells, why_not
from sparseconv.tensor import SparseTensor


class Recording:
    """The steps of one run, and their values on the sample."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.steps: list[Step] = []
        self.values: list[Any] = []
        self._names = {id(module): name for name, module in net.named_modules()}
        self._net = type(net).__name__

    def place(self) -> str:
        """The module that is running, by its name in the network."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            name = self._names.get(id(owner))
            if name is not None:
                return f"{name} ({type(owner).__name__})" if name else self._net
            frame = frame.f_back
        return self._net

    def refuse(self, what: str, instead: str) -> None:
        """Raise ValueError, in words that name the place."""
        raise ValueError(f"{self.place()} cannot be streamed: {what}: {instead}")

    def add(self, step: Step, *value: Any) -> int:
        """Write a step down and run it on the sample; its number."""
        step.number, step.where = len(self.steps), self.place()
        with torch.no_grad():
            made = value[0] if value else step.run(self.values)
        if isinstance(made, torch.Tensor):
            step.channels, step.dtype = tuple(made.shape[1:] if step.is_rows else made.shape), made.dtype
        self.steps.append(step)
        self.values.append(made)
        return step.number

    def rows(self, step: Step, *value: Any) -> Recorded:
        """A step whose value is a tensor, as the network goes on with it."""
        return self.shown(self.add(step, *value))

    def shown(self, number: int) -> Recorded:
        made = self.values[number].detach().as_subclass(Recorded)
        made.recording, made.number = self, number
        return made  # type: ignore[no-any-return]

    def input(self, coords: torch.Tensor, batch_size: int, like: VoxelGrid, features: torch.Tensor) -> SparseTensor:
        """The sample as the network is given it."""
        real = VoxelGrid(coords, batch_size, like.voxel_size if like.is_placed else None)
        real.origin, real.is_placed = like.origin, like.is_placed
        grid = WatchedGrid.of(self, self.add(InputGrid(scale=(Fraction(1),) * real.rank), real))
        return SparseTensor(grid, self.rows(InputRows(place=grid.number), features))


class Recorded(torch.Tensor):
    """Rows of a grid, or a tensor of the whole scene, while a network is recorded: it holds the sample's values."""

    recording: Recording
    number: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        first = next(_found(given))
        name = plain_name(func)
        if name == "get":  # of a property
            name = func.__self__.__name__  # type: ignore[attr-defined]
            if name == "data":
                return first
        if asks(func, name):
            plain = _mapped((tuple(args), dict(kwargs or {})), lambda r: r.recording.values[r.number])
            return func(*plain[0], **plain[1])
        if tells(func, name):
            first.recording.refuse(f"it reads the values of rows ({name})", "a streamed network must not look at them")
        return _called(first.recording, func, name, tuple(args), dict(kwargs or {}))


def _found(given: Any) -> Iterator[Recorded]:
    """The recorded tensors among arguments."""
    for one in given:
        if isinstance(one, Recorded):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _found(one)
        elif isinstance(one, dict):
            yield from _found(one.values())


def _mapped(given: Any, change: Callable[[Recorded], Any]) -> Any:
    if isinstance(given, Recorded):
        return change(given)
    if isinstance(given, (list, tuple)):
        return type(given)([_mapped(one, change) for one in given])
    return {key: _mapped(one, change) for key, one in given.items()} if isinstance(given, dict) else given


def _called(recording: Recording, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A function of torch on recorded tensors: a step of its own."""
    target = None
    if name.endswith("_") and not name.startswith("_"):  # in place
        target, name = args[0], name[:-1]
        func = getattr(torch.Tensor, name, None) or getattr(torch.nn.functional, name)
    elif kwargs.get("inplace") or (name == "relu" and args[1:] == (True,)):
        target = args[0]
        kwargs = {**kwargs, "inplace": False}
        args = args[:-1] if args[-1] is True else args
    elif name in ("iadd", "isub", "imul", "itruediv", "ipow"):
        target, name = args[0], name[1:]
        func = getattr(torch.Tensor, name if name != "truediv" else "div")
    if kwargs.get("out") is not None:
        recording.refuse(f"{name} writes into out=", "let it return its result")
    steps = recording.steps
    found = list(_found((*args, *kwargs.values())))
    places = {steps[one.number].place for one in found} - {None}
    rows = tuple(dict.fromkeys(one.number for one in found if steps[one.number].is_rows))
    call_args, call_kwargs = _mapped((args, kwargs), lambda one: Ref(one.number))
    if len(places) > 1:
        recording.refuse(f"{name} joins rows of different voxels", "bring them onto one grid first")
    if not rows:
        made: Any = recording.add(Call(function=func, args=call_args, kwargs=call_kwargs))
        return _results(recording, made, None)
    place: Any = places.pop()
    size = recording.values[place].num_voxels
    if name == "__getitem__":
        special = _item(recording, args, place)
        if special is not None:
            return special
    if name == "batch_norm" and _training(args, kwargs):
        return _batch_norm(recording, *args, **kwargs)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else found[0]
    others = max((one.ndim for one in found if one is not first and steps[one.number].is_rows), default=0)
    reason = why_not(name, args, kwargs, (first.ndim, 0 if name in ("cat", "concat") else others))
    if name in ("view", "reshape"):
        call_args, reason = _reshaped(call_args, size)
    if reason is not None:
        recording.refuse(f"torch's {name} is called on rows", reason)
    pads = is_product(name) and first.device.type == "cpu" and first.ndim == 2
    step = Call(function=func, args=call_args, kwargs=call_kwargs, rows=rows, place=place, pads=pads)
    made = _results(recording, recording.add(step), place)
    if target is not None:
        target.number = made.number
        return target
    return made


def _results(recording: Recording, number: int, place: int | None) -> Any:
    """What a call returned, as the network goes on with it."""
    value = recording.values[number]
    size = None if place is None else recording.values[place].num_voxels
    if isinstance(value, (tuple, list)):
        parts = [recording.rows(Pick(of=number, at=at, place=place)) for at in range(len(value))]
        steps = [recording.steps[part.number] for part in parts]
        if place is not None and any(len(recording.values[step.number]) != size for step in steps):
            recording.refuse("a function does not give back as many rows as it took", "work along the channels")
        return type(value)(parts)
    if not isinstance(value, torch.Tensor):
        recording.refuse("a function of rows gives back no tensor", "leave reading to the caller")
    if place is not None and (value.ndim < 1 or value.shape[0] != size):
        recording.refuse("a function does not give back as many rows as it took", "work along the channels")
    return recording.shown(number)


def _item(recording: Recording, args: tuple, place: int) -> Any:
    """x[index] where it is more than a look at channels; None where it is that."""
    x, index = args
    steps = recording.steps
    if not steps[x.number].is_rows:  # a value for each row, such as that of its batch item
        if isinstance(index, Recorded) and index.ndim == 1 and not index.is_floating_point():
            call = Call(
                function=torch.Tensor.__getitem__,
                args=(Ref(x.number), Ref(index.number)),
                kwargs={},
                rows=(index.number,),
                place=place,
            )
            return recording.rows(call)
        recording.refuse("a tensor of the whole scene is indexed by rows", "index it by one integer a row")
    if isinstance(index, Recorded):
        for number, step in enumerate(steps):
            if isinstance(step, SubsetGrid) and step.mask == index.number and step.of == place:
                return recording.rows(Kept(of=x.number, mask=index.number, place=number))
        recording.refuse("rows are chosen by a mask", "SparseTensor.subset(mask) knows the voxels that are left")
    first = index[0] if isinstance(index, tuple) and index else index
    if not (first is Ellipsis or (isinstance(first, slice) and first == slice(None))):
        recording.refuse(f"rows are chosen by their number, x[{index!r}]", "SparseTensor.subset(mask) chooses voxels")
    return None


def _reshaped(args: tuple, size: int) -> tuple[tuple, str | None]:
    shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if len(shape) < 2 or (-1 in shape[1:] and shape[0] != size):
        return args, "keep the rows as the first axis and name the others"
    if shape[0] == size and -1 not in shape[1:]:
        return (args[0], -1, *shape[1:]), None
    return (args, None) if shape[0] == -1 else (args, "keep the rows as the first axis and name the others")


def _training(args: tuple, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _batch_norm(
    recording: Recording,
    x: Recorded,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Recorded:
    """By statistics of the batch: they are one step over all rows, and norming is another."""
    place: Any = recording.steps[x.number].place
    if x.ndim != 2:
        recording.refuse("a batch norm of more than rows and channels", "norm features (N, C)")
    step = BatchStatistics(of=x.number, grid=place, running=(running_mean, running_var), momentum=momentum)
    found = recording.add(step)
    mean, var = (recording.rows(Pick(of=found, at=at)) for at in range(2))
    arguments = (Ref(x.number), Ref(mean.number), Ref(var.number), weight, bias, False, 0.0, eps)
    call = Call(function=torch.nn.functional.batch_norm, args=arguments, kwargs={}, rows=(x.number,), place=place)
    return recording.rows(call)


class WatchedGrid(VoxelGrid):
    """A grid of the sample: what is asked of it is written down."""

    recording: Recording
    number: int
    _rows: Recorded | None
    is_watched = True

    @classmethod
    def of(cls, recording: Recording, number: int) -> WatchedGrid:
        real: VoxelGrid = recording.values[number]
        grid = object.__new__(cls)
        grid.recording, grid.number = recording, number
        grid.batch_size, grid.voxel_size, grid.origin = real.batch_size, real.voxel_size, real.origin
        grid.is_placed, grid.derived, grid._rows = real.is_placed, {}, None
        return grid

    @property
    def coords(self) -> Any:  # type: ignore[override]
        """Where the voxels lie, as rows."""
        if self._rows is None:
            self._rows = self.recording.rows(Coords(place=self.number))
        return self._rows

    @property
    def num_voxels(self) -> int:
        return self.recording.values[self.number].num_voxels  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.recording.values[self.number].device  # type: ignore[no-any-return]

    def _unknown(self, *_: Any, **__: Any) -> Any:
        self.recording.refuse(
            "it asks which voxels the whole scene has", "blocks know their surroundings only; give extents as numbers"
        )

    extent: Any = property(_unknown)
    _space: Any = property(_unknown)
    batch_counts: Any = property(_unknown)
    batch_offsets: Any = property(_unknown)
    batch_rows: Any = property(_unknown)
    cells: Any = property(_unknown)
    lookup: Any = _unknown
    union: Any = _unknown
    intersection: Any = _unknown
    difference: Any = _unknown
    sorted: Any = _unknown

    def coarsen(self, factor: Any) -> VoxelGrid:
        return self._other("coarsen", factor, Window.of(self.rank, factor, factor, padding=0), False)

    def refine(self, factor: Any) -> VoxelGrid:
        return self._other("refine", factor, Window.of(self.rank, factor, factor, padding=0), True)

    def dilate(self, radius: Any = 1) -> VoxelGrid:
        width = [2 * r + 1 for r in per_axis(radius, self.rank, "radius", 0)]
        return self._other("dilate", radius, Window.of(self.rank, width), False)

    def _other(self, method: str, amount: Any, window: Window, is_transposed: bool) -> VoxelGrid:
        own: Any = self.recording.steps[self.number]
        step = MadeGrid(
            of=self.number,
            method=method,
            amount=amount,
            window=window,
            is_transposed=is_transposed,
            scale=scale_after(own.scale, window, is_transposed),
        )
        return WatchedGrid.of(self.recording, self.recording.add(step))

    def subset(self, mask: torch.Tensor) -> VoxelGrid:
        if not isinstance(mask, Recorded):
            self.recording.refuse("voxels are chosen by a mask that is not made of features", "make it of features")
        own: Any = self.recording.steps[self.number]
        step = SubsetGrid(of=self.number, mask=mask.number, scale=own.scale)  # type: ignore[attr-defined]
        return WatchedGrid.of(self.recording, self.recording.add(step))

    def to_dense(self, features: Any, extent: Any = None) -> torch.Tensor:
        if extent is None:
            self._unknown()
        return self.recording.rows(Dense(of=features.number, grid=self.number, extent=extent))

    def pooled(self, x: Any, how: str) -> torch.Tensor:
        """Features (N, C) -> (B, C), pooled over each item: "sum", "average" or "max"."""
        return self.recording.rows(PooledItems(of=x.number, grid=self.number, how=how))

    def standardised(self, x: Any, groups: int, eps: float) -> torch.Tensor:
        """`ops.items.standardised`: statistics are one step, and norming by them is another."""
        found = self.recording.add(ItemStatistics(of=x.number, grid=self.number, groups=groups))
        mean, var = (self.recording.rows(Pick(of=found, at=at)) for at in range(2))
        arguments = (Ref(x.number), Ref(self.coords.number), Ref(mean.number), Ref(var.number), eps)
        rows = (x.number, self.coords.number)
        step = Call(function=standardised_rows, args=arguments, kwargs={}, rows=rows, place=self.number)
        return self.recording.rows(step)

    def __repr__(self) -> str:
        return f"WatchedGrid({self.num_voxels} voxels)"


#: what both constructors of plans take after source and kernel_size
DEFAULTS = {
    "stride": 1,
    "dilation": 1,
    "padding": None,
    "taps": None,
    "boundary": "absent",
    "groups": 1,
    "backend": "auto",
}


class WatchedPlan:
    """What `ConvolutionPlan` is on a `WatchedGrid`: the same arguments, and steps in the place of results."""

    def __init__(self, source: WatchedGrid, kernel_size: Any = None, **options: Any) -> None:
        self._make(source, kernel_size, options, False)

    def _make(self, source: WatchedGrid, kernel_size: Any, options: dict[str, Any], generative: bool) -> None:
        recording, target = source.recording, options.pop("target", None)
        deterministic, shape = options.pop("deterministic", None), options.pop("shape", None)
        given: Any = [*(options.get(name, default) for name, default in DEFAULTS.items()), deterministic]
        window, edge = checked_window(source, kernel_size, *given)
        if not boundary_is_local(edge):
            words = "give Boundary.forbid(extent)" if edge.kind == "forbid" else "its two ends are far apart"
            recording.refuse(f"the boundary {edge.kind!r} looks at the whole scene", words)
        self.groups, self.window, self.is_transposed = options.pop("groups", 1), window, generative
        onto = target if isinstance(target, WatchedGrid) else None
        reaches = target == "full" or generative or window.is_strided or shape is not None
        if target is not None and onto is None and target != "full":
            raise ValueError(f"target must be a grid that the network made, 'full' or None; got {target!r}")
        if generative:
            options["generative"] = True
        if target == "full":
            options["target"] = "full"
        if shape is not None:
            options["shape"] = shape
        made = {"kernel_size": kernel_size, **options}
        goal = onto.number if onto is not None else None if reaches or edge.kind == "forbid" else source.number
        self.source, self.recording = source, recording
        self.number = recording.add(
            PlanStep(source=source.number, target=goal, window=window, is_transposed=generative, options=made)
        )
        if goal is None:
            own: Any = recording.steps[source.number]
            scale = scale_after(own.scale, window, generative)
            step: GridStep = TargetGrid(plan=self.number, same=not reaches, scale=scale)
            self.target = WatchedGrid.of(recording, recording.add(step))
        else:
            self.target = onto if onto is not None else source

    @classmethod
    def transposed(cls, source: WatchedGrid, kernel_size: Any = None, **options: Any) -> WatchedPlan:
        """From coarse voxels to fine ones; arguments of `ConvolutionPlan.transposed`."""
        plan = object.__new__(cls)
        plan._make(source, kernel_size, options, True)
        return plan

    @classmethod
    def within(cls, source: WatchedGrid, shape: Any, kernel_size: Any, generative: bool, **size: Any) -> WatchedPlan:
        """`plan_within`: onto the voxels of [0, shape) that a window reaches."""
        plan = object.__new__(cls)
        plan._make(source, kernel_size, {"shape": shape, **size}, generative)
        return plan

    @property
    def kernel_map(self) -> Any:
        self.recording.refuse("it works on the edges of a kernel map", "use convolutions and poolings of sparseconv.nn")

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def num_in(self) -> int:
        return self.source.num_voxels

    @property
    def num_taps(self) -> int:
        return len(self.window.offsets)

    @property
    def boundary(self) -> Boundary:
        return Boundary.absent()

    def _over(self, kind: str, x: Any, *args: Any, **kwargs: Any) -> int:
        names, options = _mapped((args, kwargs), lambda one: Ref(one.number))
        if not isinstance(x, Recorded) or self.recording.steps[x.number].place != self.source.number:
            self.recording.refuse("a plan is given rows of other voxels", "give it those of its source")
        return self.recording.add(
            OverEdges(
                plan=self.number,
                x=x.number,
                kind=kind,
                args=names,
                kwargs=options,
                groups=self.groups,
                place=self.target.number,
            )
        )

    def execute(self, x: Any, weight: torch.Tensor, bias: Any = None, **after: Any) -> torch.Tensor:
        """`ConvolutionPlan.execute`, written down."""
        return self.recording.shown(self._over("convolve", x, weight, bias, **after))

    def pooled(self, x: Any, how: str) -> torch.Tensor:
        """`ops.sum_pool` or `ops.avg_pool`: "sum", "average", "average_of_taps"."""
        return self.recording.shown(self._over(how, x))

    def max_pooled(self, x: Any) -> tuple[torch.Tensor, ...]:
        """`ops.max_pool`."""
        made, place = self._over("max", x), self.target.number
        return tuple(self.recording.rows(Pick(of=made, at=at, place=place)) for at in range(2))

    def max_unpooled(self, x: Any, winners: Any) -> torch.Tensor:
        """`ops.max_unpool`."""
        return self.recording.shown(self._over("max_unpool", x, winners))

    def localize(self, x: torch.Tensor) -> tuple[torch.Tensor, WatchedPlan]:
        return x, self

    def transpose(self) -> WatchedPlan:
        """The same edges reversed."""
        back = object.__new__(WatchedPlan)
        back.__dict__.update(self.__dict__)
        back.source, back.target, back.is_transposed = self.target, self.source, not self.is_transposed
        step = PlanStep(
            source=back.source.number,
            target=back.target.number,
            window=self.window,
            is_transposed=back.is_transposed,
            of=self.number,
        )
        back.number = self.recording.add(step)
        return back

    def with_groups(self, groups: int) -> WatchedPlan:
        """The same edges for another number of channel groups."""
        other = object.__new__(WatchedPlan)
        other.__dict__.update(self.__dict__)
        other.groups = groups
        return other

    def kept_with(self, grid: VoxelGrid) -> WatchedPlan:
        return self


WatchedGrid.plan_type = WatchedPlan
