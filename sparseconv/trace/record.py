"""A network runs once on a few made-up voxels, and each thing that it does to rows is recorded as a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.tensor import SparseTensor
from sparseconv.trace.program import (
    Call,
    GridStep,
    Kept,
    Layer,
    LayerGrid,
    LayerRows,
    Pick,
    Ref,
    SparseRef,
    Step,
    SubsetGrid,
    filled,
    mapped,
    modes_now,
    parts_of,
)
from sparseconv.trace.row_wise import asks, is_product, plain_name, tells, why_not
from sparseconv.trace.totals import BatchStatistics, normed_rows

#: whether a module, given by its name too, is recorded as one step
Layers = Callable[[str, torch.nn.Module], bool]


class Recording:
    """The steps of one run, and their values on the sample.

    Modules for which ``layers`` holds are one step each, whatever they do. ``purpose`` is the word in error messages:
    the network cannot be "streamed".
    """

    grid_type: Any  # `watched.WatchedGrid`

    def __init__(self, net: torch.nn.Module, layers: Layers | None = None, purpose: str = "streamed") -> None:
        self.steps: list[Step] = []
        self.values: list[Any] = []
        #: those around the network
        self.modes = modes_now()
        #: steps whose values a network has written over since
        self.stale: set[int] = set()
        #: what stands for each grid, by its step
        self.grids: dict[int, Any] = {}
        self.purpose, self._layers = purpose, layers
        self._names = {id(module): name for name, module in net.named_modules()}
        self._net = type(net).__name__
        self._within = 0  # layers that are running, one in another

    def ended(self) -> None:
        """Let go of what is in a circle; no more is recorded."""
        for grid in self.grids.values():
            grid.derived.clear()  # plans, which hold that grid
        self.grids.clear()

    def place(self) -> tuple[str, str]:
        """The module that is running, by its name in the network, and in words."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            name = self._names.get(id(owner))
            if name:
                return name, f"{name} ({type(owner).__name__})"
            if name is not None:
                break
            frame = frame.f_back
        return "", self._net

    def refuse(self, what: str, instead: str) -> None:
        """Raise ValueError, in words that name the place."""
        raise ValueError(f"{self.place()[1]} cannot be {self.purpose}: {what}: {instead}")

    # ---- layers that are called as a whole

    @contextmanager
    def watching(self, net: Any) -> Iterator[None]:
        """While the network runs, its layers are recorded as what they are."""
        with ExitStack() as stack:
            for name, module in net.named_modules() if self._layers is not None else ():
                if self._layers is not None and self._layers(name, module):
                    stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        self._within += 1
        if self._within > 1:
            return None
        self._given = mapped((args, kwargs), (SparseTensor, VoxelGrid, Recorded), self._referred)
        return filled(self._given, self.values)

    def _referred(self, one: Any) -> Any:
        """A reference in the place of what is made of rows, or of its grid."""
        if isinstance(one, Recorded):
            return Ref(one.number)
        if isinstance(one, self.grid_type):
            return Ref(one.number)
        if isinstance(one, VoxelGrid):
            return one
        if not isinstance(one.features, Recorded) or not one.grid.is_watched:
            return one
        if self.steps[one.features.number].place != one.grid.number:
            self.refuse("features are put on other voxels than their own", "make them there by a layer")
        return SparseRef(one.features.number, one.grid.number)

    def _leave(self, module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        self._within -= 1
        if self._within:
            return None
        if not isinstance(result, (torch.Tensor, SparseTensor)):
            raise ValueError(
                f"{self._names[id(module)]} returns {type(result).__name__}; a layer that is recorded as a whole "
                "returns one tensor"
            )
        given, more = self._given
        layer = self.add(Layer(layer=module, args=given, kwargs=more), result)
        self.steps[layer].module = self._names[id(module)]
        if not isinstance(result, SparseTensor):
            near = [self.steps[ref.number].place for ref in parts_of(self._given, Ref)]
            place = next((p for p in near if p is not None and self.values[p].num_voxels == len(result)), None)
            return self.rows(LayerRows(of=layer, place=place))
        known = [n for n, step in enumerate(self.steps) if isinstance(step, GridStep) and self.values[n] is result.grid]
        at = known[0] if known else self.add(LayerGrid(of=layer))
        return SparseTensor(self.grid(at), self.rows(LayerRows(of=layer, place=at)))

    def grid(self, number: int) -> Any:
        """What stands for the grid of a step while the network runs."""
        if number not in self.grids:
            self.grid_type.of(self, number)
        return self.grids[number]

    def refuse_stale(self) -> None:
        """Raise ValueError, in words that name the place."""
        self.refuse(
            "it writes in place into a tensor that another one shares memory with, and goes on with that one",
            "let functions return their results",
        )

    def written(self, target: Any, made: Recorded, place: int | None) -> Recorded:
        """``made`` in the place of ``target``, and of its dtype; who looks into the same memory may not be used."""
        if not isinstance(target, Recorded):
            self.refuse("it writes in place into a tensor that is not made of rows", "let functions return results")
        before = self.values[target.number]
        self.stale |= {at for at, value in enumerate(self.values) if shares_memory(value, before)}
        if self.values[made.number].dtype != before.dtype:
            args = Ref(made.number), before.dtype
            rows = () if place is None else (made.number,)
            made = self.rows(Call(function=torch.Tensor.to, args=args, kwargs={}, rows=rows, place=place))
        target.number = made.number
        self.stale.discard(made.number)
        return target

    def add(self, step: Step, *value: Any) -> int:
        """Write a step down and run it on the sample; its number."""
        step.number, (step.module, step.where) = len(self.steps), self.place()
        modes = modes_now()
        step.modes = None if modes == self.modes else modes
        if not self.stale.isdisjoint(step.uses):
            self.refuse_stale()
        with torch.no_grad():
            made = value[0] if value else step.run(self.values)
        if isinstance(made, torch.Tensor) and not isinstance(step, Layer):
            step.channels, step.dtype = tuple(made.shape[1:] if step.is_rows else made.shape), made.dtype
        self.steps.append(step)
        self.values.append(made)
        return step.number

    def rows(self, step: Step, *value: Any) -> Recorded:
        """A step whose value is a tensor, as the network goes on with it."""
        return self.shown(self.add(step, *value))

    def shown(self, number: int) -> Recorded:
        made: Recorded = self.values[number].detach().as_subclass(Recorded)
        made.recording, made.number = self, number
        return made


class Recorded(torch.Tensor):
    """Rows of a grid, or a tensor of the whole scene, while a network is recorded: it holds the sample's values."""

    recording: Recording
    number: int
    is_watched = True  # its number of rows says nothing of the scene's

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tuple(args), dict(kwargs or {})
        first = parts_of(given, Recorded)[0]
        name = plain_name(func)
        if name == "get":  # of a property
            owner: Any = func
            name = owner.__self__.__name__
            if name == "data":
                return first
        if asks(name):
            plain = mapped(given, Recorded, lambda one: one.recording.values[one.number])
            return func(*plain[0], **plain[1])
        if tells(func, name):
            first.recording.refuse(f"it reads the values of rows ({name})", "a network must not look at them")
        return _called(first.recording, func, name, *given)


def shares_memory(value: Any, other: torch.Tensor) -> bool:
    """Whether a tensor has numbers where another one has its own."""
    if not isinstance(value, torch.Tensor) or not value.numel() or not other.numel():
        return False
    if value.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if value.itemsize != other.itemsize:
        return True
    count = value.untyped_storage().nbytes() // value.itemsize
    one, two = (torch.arange(count).as_strided(t.shape, t.stride(), t.storage_offset()) for t in (value, other))
    return bool(torch.isin(one, two).any())


def referring(given: Any) -> Any:
    """Arguments with references in the place of recorded tensors."""
    return mapped(given, Recorded, lambda one: Ref(one.number))


def _called(recording: Recording, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A function of torch on recorded tensors: a step of its own."""
    target = None
    if name.endswith("_") and not name.startswith("_"):  # in place
        target, name = args[0], name[:-1]
        plain: Any = getattr(torch.Tensor, name, None) or getattr(torch.nn.functional, name, None)
        if plain is None:
            recording.refuse(f"torch's {name}_ is called on rows", "it is not known to make each row of one row")
        func = plain
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
    found = parts_of((args, kwargs), Recorded)
    places = {steps[one.number].place for one in found} - {None}
    rows = tuple(dict.fromkeys(one.number for one in found if steps[one.number].is_rows))
    call_args, call_kwargs = referring((args, kwargs))
    if len(places) > 1:
        recording.refuse(f"{name} joins rows of different voxels", "bring them onto one grid first")
    if not rows:
        whole: Any = recording.add(Call(function=func, args=call_args, kwargs=call_kwargs))
        made = _results(recording, whole, None)
        return made if target is None else recording.written(target, made, None)
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
    return made if target is None else recording.written(target, made, place)


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
        recording.refuse("a tensor of the whole scene is indexed by rows", "index it by one integer per row")
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
    arguments = (Ref(x.number), Ref(mean.number), Ref(var.number), weight, bias, eps)
    call = Call(function=normed_rows, args=arguments, kwargs={}, rows=(x.number,), place=place)
    return recording.rows(call)
