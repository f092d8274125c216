"""Geometry and convolutions as operators on tensors: what torch.compile and torch.export record of a network.

A grid or a plan travels between operators as a handle: an int64 tensor (1,) on the CPU, made while the program runs.
Its memory owns the object, which lives as long as the tensor. A number that another process wrote down names nothing.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from sparseconv.checks import check_choice, row
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, IndexRange, Ints
from sparseconv.operators import checked_convolution, checked_weight_gradient
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.shared import shared_plan
from sparseconv.plan.weights import packed
from sparseconv.plan.within import dense_shape, plan_within
from sparseconv.torch_private import check_in_trace

Kind = TypeVar("Kind", VoxelGrid, ConvolutionPlan)

_numbers = itertools.count(1 + secrets.randbits(61))
_owners: weakref.WeakValueDictionary[int, _Owner] = weakref.WeakValueDictionary()

#: the operators; cpp/operators.cpp offers the same to programs without Python
SCHEMAS = (
    "grid(Tensor coords, SymInt items, float[] voxel_size, float[] origin) -> Tensor",
    "subset(Tensor grid, Tensor mask, Tensor coords) -> (Tensor, Tensor)",
    "lookup(Tensor grid, Tensor coords) -> Tensor",
    "to_dense(Tensor grid, Tensor x, SymInt items, int[] start, SymInt[] shape) -> Tensor",
    "pool_items(Tensor grid, Tensor x, SymInt items, str how) -> Tensor",
    "standardise_items(Tensor grid, Tensor x, int groups, float eps) -> Tensor",
    "plan(Tensor source, Tensor? target, int[]? kernel_size, int[] taps, int[] stride, int[] dilation, int[]? padding,"
    " str outputs, SymInt[] shape, str boundary, int[] extent, str backend) -> Tensor",
    "transposed(Tensor plan) -> Tensor",
    "target(Tensor plan, Tensor coords) -> (Tensor, Tensor)",
    "execute(Tensor plan, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor onto, int groups,"
    " str activation, float[] numbers) -> Tensor",
    "pool(Tensor plan, Tensor x, Tensor onto, str how) -> Tensor",
    "max_pool(Tensor plan, Tensor x, Tensor onto) -> (Tensor, Tensor)",
    "max_unpool(Tensor plan, Tensor x, Tensor winners, Tensor onto) -> Tensor",
)
#: what programs with derivatives have besides; no program in a file holds them
TRAINING_SCHEMAS = (
    "convolve(Tensor plan, Tensor x, Tensor weight, Tensor? bias, SymInt rows, int groups, bool adjoint) -> Tensor",
    "weight_grad(Tensor plan, Tensor x, Tensor grad, int taps, int groups) -> Tensor",
    "inside(Tensor grid, SymInt[] shape) -> Tensor",
    "from_dense(Tensor grid, Tensor dense, SymInt rows, int[] start) -> Tensor",
    "rows(Tensor x) -> Tensor",
    "max_pick(Tensor plan, Tensor grad, Tensor winners, Tensor onto) -> Tensor",
    "spread_items(Tensor grid, Tensor values, SymInt rows) -> Tensor",
    "pick_items(Tensor grid, Tensor x, Tensor winners) -> Tensor",
    "max_items(Tensor grid, Tensor x, SymInt items) -> (Tensor, Tensor)",
    "unmax_items(Tensor grid, Tensor values, Tensor winners, SymInt rows) -> Tensor",
    "live(Tensor x, Tensor count) -> Tensor",
    "filled(Tensor x, Tensor count, int axis, float fill) -> Tensor",
    "number.int(Tensor like, SymInt value) -> Tensor",
    "number.float(Tensor like, float value) -> Tensor",
    "arithmetic(str function, Tensor[] numbers, float[] constants, bool floating) -> Tensor",
    "mean_rows(Tensor x, Tensor count, int axis, int[] dims, bool keepdim) -> Tensor",
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, Tensor count, float momentum,"
    " float eps, bool single) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_back(Tensor grad, Tensor x, Tensor? weight, Tensor? mean, Tensor? var, Tensor? saved_mean,"
    " Tensor? saved_std, Tensor count, bool training, float eps, bool[] mask) -> (Tensor, Tensor, Tensor)",
)

_ops: Any = torch.ops.sparseconv
_library = torch.library.Library("sparseconv", "FRAGMENT")


def define(*schemas: str) -> None:
    """Add operators to the family."""
    for schema in schemas:
        _library.define(schema)


define(*SCHEMAS, *TRAINING_SCHEMAS)


class _Owner(bytearray):
    """The memory of a handle: eight bytes that say a number, and what that number stands for."""

    held: Any


def handle(held: Any) -> torch.Tensor:
    """An int64 tensor (1,) whose memory owns ``held``."""
    number = next(_numbers)
    owner = _Owner(number.to_bytes(8, "little"))
    owner.held = held
    _owners[number] = owner
    return torch.frombuffer(owner, dtype=torch.int64)


def held_by(given: torch.Tensor, kind: type[Kind]) -> Kind:
    """What a handle stands for. Raises ValueError where that is gone, of another process, or of another kind."""
    if given.dtype != torch.int64 or given.shape != (1,) or given.device.type != "cpu":
        raise ValueError(f"a handle is an int64 tensor (1,) on the CPU; got {given.dtype} {tuple(given.shape)}")
    found = own_of(given)
    if not isinstance(found, kind):
        raise ValueError(
            f"this handle stands for {'nothing here' if found is None else found}, and {kind.__name__} is wanted: a "
            "handle lives as long as its tensor, in the process that made it"
        )
    return found


def own_of(given: torch.Tensor) -> Any:
    """What a handle stands for, of any kind; None for a tensor that is none, or of something that is gone."""
    owner = _owners.get(int(given))
    if owner is None:
        return None
    if callable(owner.held):  # what a program returned is made where somebody asks for it
        owner.held = _called(owner.held)
    return owner.held[0]


def untraced_by_frames(run: Any) -> Any:
    """A function whose own calls no torch.compile looks at, where it is called by Python that Dynamo left alone."""
    found: list[Any] = []

    def outside(*args: Any) -> Any:
        if not found and "torch._dynamo" in sys.modules:
            found.append(torch.compiler.disable(run))
        return (found[0] if found else run)(*args)

    return outside


@untraced_by_frames
def _called(make: Any) -> Any:
    return make()


def implement(name: str) -> Any:
    """Register a function as what the operator of this name does, on every device."""

    def register(function: Any) -> Any:
        @untraced_by_frames
        def run(*args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        _library.impl(name, run, "CompositeExplicitAutograd")
        return function

    return register


def shape_of(name: str) -> Any:
    """Register what a trace knows of an operator's results."""
    return torch.library.register_fake(f"sparseconv::{name}", lib=_library)


def _some_handle(*_: Any) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64)


def _some_voxels(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A grid of as many voxels as its coordinates say when the program runs."""
    rows = torch.library.get_ctx().new_dynamic_size()
    return _some_handle(), coords.new_empty((rows, coords.shape[1]), dtype=torch.int32)


def _grid_and_coords(grid: VoxelGrid) -> tuple[torch.Tensor, torch.Tensor]:
    return handle((grid,)), grid.coords.clone()


# ---- grids


@implement("grid")
def _grid(coords: torch.Tensor, items: int, voxel_size: list[float], origin: list[float]) -> torch.Tensor:
    own = coords.clone()  # a compiler may write into what it was given
    return handle((VoxelGrid(own, items, tuple(voxel_size or ()) or None, tuple(origin or ()) or None),))


@implement("subset")
def _subset(grid: torch.Tensor, mask: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _grid_and_coords(held_by(grid, VoxelGrid).subset(mask))


@implement("lookup")
def _lookup(grid: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    return held_by(grid, VoxelGrid).lookup(coords)


@implement("to_dense")
def _to_dense(grid: torch.Tensor, x: torch.Tensor, items: int, start: list[int], shape: list[int]) -> torch.Tensor:
    box = IndexRange(tuple(start), [a + n for a, n in zip(start, shape)])
    return held_by(grid, VoxelGrid).to_dense(x, box).contiguous()


@implement("pool_items")
def _pool_items(grid: torch.Tensor, x: torch.Tensor, items: int, how: str) -> torch.Tensor:
    from sparseconv.ops import global_pooling  # loaded where it is used

    how_to = {
        "sum": global_pooling.global_sum_pool,
        "average": global_pooling.global_avg_pool,
        "max": global_pooling.global_max_pool,
    }
    check_choice("how", how, tuple(how_to))
    return how_to[how](x, held_by(grid, VoxelGrid))


@implement("standardise_items")
def _standardise_items(grid: torch.Tensor, x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    from sparseconv.ops.items import standardised

    found = held_by(grid, VoxelGrid)
    if x.ndim != 2 or len(x) != len(found) or x.shape[1] % max(1, groups) or groups < 1:
        raise ValueError(f"x must be ({len(found)}, C), C a multiple of {groups}; got {tuple(x.shape)}")
    y = standardised(x, found, groups, eps)
    return x.clone() if y is x else y  # no result shares an operand's memory


@implement("inside")
def _inside(grid: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The same grid, where its voxels lie in [0, shape)."""
    found = held_by(grid, VoxelGrid)
    if isinstance(found, FixedGrid):  # a scene that does not end there runs eagerly, which raises the error
        if (ends := getattr(running, "ends", None)) is not None:
            found.end_at(ends)
    elif len(found):
        extent = found.extent
        if not IndexRange.of_shape(tuple(shape)).encloses(extent):
            raise ValueError(
                f"indices must lie within spatial_shape {list(shape)}, but they reach over {extent}: pass a larger "
                "shape, or leave such rows out"
            )
    return handle((found,))


shape_of("grid")(_some_handle)
shape_of("inside")(_some_handle)
shape_of("subset")(lambda grid, mask, coords: _some_voxels(coords))
shape_of("lookup")(lambda grid, coords: coords.new_empty(coords.shape[0], dtype=torch.int64))
shape_of("to_dense")(lambda grid, x, items, start, shape: x.new_empty((items, x.shape[1], *shape)))
shape_of("standardise_items")(lambda grid, x, groups, eps: torch.empty_like(x))
shape_of("pool_items")(lambda grid, x, items, how: x.new_empty((items, x.shape[1])))


# ---- plans


@implement("plan")
def _plan(
    source: torch.Tensor,
    target: torch.Tensor | None,
    kernel_size: list[int] | None,
    taps: list[int],
    stride: list[int],
    dilation: list[int],
    padding: list[int] | None,
    outputs: str,
    shape: list[int],
    boundary: str,
    extent: list[int],
    backend: str,
) -> torch.Tensor:
    grid = held_by(source, VoxelGrid)
    size: dict[str, Any] = {"stride": tuple(stride), "dilation": tuple(dilation)}
    if outputs.startswith("within"):
        window = {"padding": tuple(padding or ()), "generative": outputs.endswith("generative"), **size}
        ends = getattr(running, "ends", None) if grid.count is not None else None
        plan = _plan_within(grid, shape, tuple(kernel_size or ()), window, ends)
    else:
        rank, axes = grid.rank, tuple(extent or ())
        box = IndexRange(axes[:rank], axes[rank:]) if axes else None
        kind: Any = boundary
        options: dict[str, Any] = {
            "kernel_size": None if kernel_size is None else tuple(kernel_size),
            "padding": None if padding is None else tuple(padding),
            "boundary": Boundary(kind, box),
            "backend": backend,
            **size,
        }
        if taps:
            options["taps"] = tuple(tuple(taps[k : k + rank]) for k in range(0, len(taps), rank))
        if outputs == "full":
            options["target"] = "full"
        elif target is not None:
            options["target"] = held_by(target, VoxelGrid)
        plan = shared_plan(grid, generative=outputs == "generative", **options)
    return handle((plan, grid, plan.target))  # a plan that its grid keeps does not keep that grid


def _plan_within(
    grid: VoxelGrid, shape: Sequence[int], kernel: Ints, window: dict[str, Any], ends: torch.Tensor | None
) -> ConvolutionPlan:
    """`plan_within`; without a shape, within that of a dense layer on the voxels' own extent. Over arrays of fixed
    capacity ``ends`` is the shape of the scene at hand, on the device."""
    if len(shape) and ends is None:
        return plan_within(grid, tuple(shape), kernel, **window)
    size = window["stride"], window["padding"], window["dilation"]
    cells = dense_shape(grid.extent.end, kernel, *size)
    if min(cells) < 1:
        options = {name: window[name] for name in ("stride", "padding", "dilation")}
        return shared_plan(grid, kernel, target=VoxelGrid(grid.coords[:0], grid.batch_size), **options)
    if grid.count is not None and ends is None:  # the extent of an array of fixed capacity is a box around the scene
        last = grid.coords[:, 1:].amax(0)
        taps = ((k - 1) * d for k, d in zip(kernel, size[2]))
        steps = [(2 * p - w, s) for p, w, s in zip(size[1], taps, size[0])]
        more, step = (row(numbers, last) for numbers in zip(*steps))
        found = (torch.div(last + more, step, rounding_mode="floor") + 1).int()
        ends = grid.derived.setdefault(("ends", kernel, *size), found)
    return plan_within(grid, cells, kernel, ends=ends, **window)


@implement("transposed")
def _transposed(plan: torch.Tensor) -> torch.Tensor:
    back = held_by(plan, ConvolutionPlan).transpose()
    return handle((back, back.source, back.target))


@implement("target")
def _target(plan: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _grid_and_coords(held_by(plan, ConvolutionPlan).target)


@implement("execute")
def _execute(
    plan: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    onto: torch.Tensor,
    groups: int,
    activation: str,
    numbers: list[float],
) -> torch.Tensor:
    epilogue = None
    if activation:
        from sparseconv import pointwise  # loaded where it is used

        after = getattr(pointwise, activation, None)
        if not isinstance(after, pointwise.PointwiseDynamicFunction):
            raise ValueError(f"activation must be a function of sparseconv.pointwise by name; got {activation!r}")
        epilogue = pointwise.Epilogue(after, tuple(numbers or ()))
    ready = held_by(plan, ConvolutionPlan).with_groups(groups)
    return ready.execute(x, weight, bias, residual=residual, epilogue=epilogue)


@implement("pool")
def _pool(plan: torch.Tensor, x: torch.Tensor, onto: torch.Tensor, how: str) -> torch.Tensor:
    from sparseconv.ops import pooling

    check_choice("how", how, ("sum", "average", "average_of_taps"))
    ready = held_by(plan, ConvolutionPlan)
    if how == "sum":
        return pooling.sum_pool(x, ready)
    return pooling.avg_pool(x, ready, count_absent=how == "average_of_taps")


@implement("max_pool")
def _max_pool(plan: torch.Tensor, x: torch.Tensor, onto: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from sparseconv.ops import pooling

    return pooling.max_pool(x, held_by(plan, ConvolutionPlan))


@implement("max_unpool")
def _max_unpool(plan: torch.Tensor, x: torch.Tensor, winners: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    from sparseconv.ops import pooling

    return pooling.max_unpool(x, winners, held_by(plan, ConvolutionPlan))


def _rows_onto(x: torch.Tensor, onto: torch.Tensor, channels: int | None = None) -> torch.Tensor:
    return x.new_empty((onto.shape[0], x.shape[1] if channels is None else channels))


shape_of("plan")(_some_handle)
shape_of("transposed")(_some_handle)
shape_of("target")(lambda plan, coords: _some_voxels(coords))
shape_of("execute")(lambda plan, x, weight, bias, residual, onto, *_: _rows_onto(x, onto, weight.shape[2]))
shape_of("pool")(lambda plan, x, onto, how: _rows_onto(x, onto))
shape_of("max_pool")(lambda plan, x, onto: (_rows_onto(x, onto), _rows_onto(x, onto).to(torch.int16)))
shape_of("max_unpool")(lambda plan, x, winners, onto: _rows_onto(x, onto))


# ---- convolutions with derivatives: the two operators of `sparseconv.autograd`, by a plan's handle


@implement("convolve")
def _convolve(
    plan: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    groups: int,
    adjoint: bool,
) -> torch.Tensor:
    ready = held_by(plan, ConvolutionPlan)
    kernel_map, backend = ready.kernel_map, ready.backend
    return checked_convolution(x.contiguous(), packed(weight), bias, kernel_map, groups, adjoint, backend)


@implement("weight_grad")
def _weight_grad(plan: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, taps: int, groups: int) -> torch.Tensor:
    ready = held_by(plan, ConvolutionPlan)
    return checked_weight_gradient(x.contiguous(), grad.contiguous(), ready.kernel_map, groups, taps, ready.backend)


@implement("from_dense")
def _from_dense(grid: torch.Tensor, dense: torch.Tensor, rows: int, start: list[int]) -> torch.Tensor:
    """The cells of dense (B, C, *shape) at a grid's voxels, (N, C): the adjoint of to_dense."""
    coords = held_by(grid, VoxelGrid).coords.long()
    live = coords[:, :1] >= 0
    items, *axes = torch.where(live, coords, 0).unbind(1)
    cells = items, *(torch.where(live[:, 0], axis - first, 0) for axis, first in zip(axes, start))
    return torch.where(live, dense.movedim(1, -1)[cells], 0)


@implement("max_pick")
def _max_pick(plan: torch.Tensor, grad: torch.Tensor, winners: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    """The adjoint of max_unpool over ``plan``: the values of fine rows at the winners of coarse ones."""
    from sparseconv.ops import pooling

    return pooling.picked(grad, winners, held_by(plan, ConvolutionPlan))


@implement("spread_items")
def _spread_items(grid: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values (B, C) of batch items at the rows of each, (N, C): the adjoint of their sums."""
    items = held_by(grid, VoxelGrid).coords[:, 0].long()
    return torch.where((items >= 0)[:, None], values.index_select(0, items.clamp_min(0)), 0)


@implement("max_items")
def _max_items(grid: torch.Tensor, x: torch.Tensor, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum over the rows of each item (B, C), 0 for an empty one, and the first row that has it, -1 for none."""
    of_rows = held_by(grid, VoxelGrid).coords[:, :1]
    found, winners = [], []
    for item in range(items):
        mine = of_rows == item
        if not x.shape[0]:
            values, rows = x.new_zeros(x.shape[1]), torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
        else:
            values, rows = torch.where(mine, x, -torch.inf).max(0)
        found.append(torch.where(mine.any(), values, 0))
        winners.append(torch.where(mine.any(), rows, -1))
    if not items:
        return x.new_zeros((0, x.shape[1])), x.new_zeros((0, x.shape[1]), dtype=torch.int64)
    return torch.stack(found), torch.stack(winners)


@implement("unmax_items")
def _unmax_items(grid: torch.Tensor, values: torch.Tensor, winners: torch.Tensor, rows: int) -> torch.Tensor:
    """Values (B, C) at the rows of their winners, (rows, C), 0 elsewhere: the adjoint of that choice."""
    found = values.new_zeros((rows, values.shape[1]))
    there = winners >= 0
    return found.scatter_add_(0, winners.clamp_min(0), torch.where(there, values, 0)) if rows else found


@implement("pick_items")
def _pick_items(grid: torch.Tensor, x: torch.Tensor, winners: torch.Tensor) -> torch.Tensor:
    """The values of x (N, C) at winners (B, C), 0 for none: the adjoint of unmax_items."""
    if not x.shape[0]:
        return x.new_zeros(winners.shape)
    return torch.where(winners >= 0, x.gather(0, winners.clamp_min(0)), 0)


@implement("rows")
def _rows(x: torch.Tensor) -> torch.Tensor:
    """The number of rows of x, (1,) int32 on its device."""
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


@implement("live")
def _live(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """(N,) bool: the first ``count`` rows of x."""
    return torch.arange(x.shape[0], device=x.device) < count


@implement("filled")
def _filled(x: torch.Tensor, count: torch.Tensor, axis: int, fill: float) -> torch.Tensor:
    """x with ``fill`` in its dead rows, which lie along ``axis``."""
    if not getattr(running, "fixed", False):
        return x.clone()  # no result of an operator shares an operand's memory
    kernels = norm_kernels() if fill == 0 else None
    if kernels is not None and kernels.on_kernels(x) and kernels.zero_dead_rows(x, count, axis):
        return x  # what stood in its dead rows, nobody may read
    shape = [1] * x.ndim
    shape[axis] = -1
    live = (torch.arange(x.shape[axis], device=x.device) < count).view(shape)
    # a number beside integers would make them another dtype
    return torch.where(live, x, fill) if x.is_floating_point() else x.masked_fill(~live, fill)


@implement("number.int")
def _number_int(like: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full((), value, dtype=torch.int64, device=like.device)


@implement("number.float")
def _number_float(like: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)


@implement("arithmetic")
def _arithmetic(function: str, numbers: list[torch.Tensor], constants: list[float], floating: bool) -> torch.Tensor:
    """A function of numbers () on a device; ``constants`` has NaN where the next of ``numbers`` stands."""
    left = iter(numbers)
    of_tensor = {"truediv": torch.true_divide, "sym_float": torch.Tensor.double}
    run: Any = of_tensor.get(function) or getattr(torch, function.removeprefix("_sym_").removeprefix("sym_"))
    kind = torch.float64 if floating else torch.int64
    terms = [next(left) if c != c else numbers[0].new_full((), c, dtype=kind) for c in constants]
    return run(*[t.to(torch.float64) for t in terms] if floating else terms).to(kind)


@implement("mean_rows")
def _mean_rows(x: torch.Tensor, count: torch.Tensor, axis: int, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The mean over ``dims`` of x, which is 0 in dead rows; ``axis`` has ``count`` live ones."""
    wide = torch.promote_types(x.dtype, torch.float32)
    others = 1
    for d in {d % x.ndim for d in dims} - {axis}:
        others *= x.shape[d]
    return (x.sum(dims, keepdim, dtype=wide) / (count.to(wide).reshape(()) * others)).to(x.dtype)


#: whether this thread runs a program over arrays of fixed capacity
running = threading.local()


def has_dead_rows(x: torch.Tensor) -> bool:
    """Whether rows of x may be dead. On the CPU operators are given the live ones alone."""
    return x.is_cuda and getattr(running, "fixed", False)


def norm_kernels() -> Any:
    """The kernels of norms on a GPU, which the room `sparseconv.nn` has; None where it is not there."""
    return norm_kernels_of[0]() if norm_kernels_of else None


#: what gives them, put here by `sparseconv.nn`
norm_kernels_of: list[Any] = []


def _norm_kernels(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
    """The kernels of norms, where they serve these features; else None."""
    kernels = norm_kernels()
    return kernels if kernels is not None and kernels.on_kernels(x) and (weight is None) == (bias is None) else None


def _masked(x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    return torch.where(live, x, 0)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    count: torch.Tensor,
    momentum: float,
    eps: float,
    single: bool,
    residual: torch.Tensor | None = None,
    slope: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """torch's batch norm in training over the live rows: y, their mean, 1 / std, and the next running statistics.

    Where ``single``, fewer than two rows are their own mean and leave the statistics as they are; else one row is an
    error, as it is with torch. Then a residual is added, and what is negative is multiplied by ``slope``.
    """
    none = x.new_empty(0)
    if has_dead_rows(x) and (kernels := _norm_kernels(x, weight, bias)) is not None:
        running: Any = None
        following: Any = none, none
        if mean is not None and var is not None:  # how many batches there were is counted elsewhere
            running = mean, var, torch.empty(1, dtype=torch.int64, device=x.device)
            following = torch.empty_like(mean), torch.empty_like(var)
        norm = kernels.Norm(eps, momentum, slope, running, count, following)
        y, kept = kernels.forward(
            x.contiguous(), weight, bias, None if residual is None else residual.contiguous(), norm
        )
        c = x.shape[1]
        return y, kept[:c], kept[c : 2 * c], *following
    found: Any
    if has_dead_rows(x):
        found = _norm_of_live_rows(x, weight, bias, mean, var, count, momentum, eps)
    elif x.shape[0] < (2 if single else 1):
        wide, of_channels = x.to(torch.promote_types(x.dtype, torch.float32)), x.new_zeros(x.shape[1]).float()
        y = wide - wide
        y = y if weight is None else y * weight
        seen = wide.sum(0) if x.shape[0] else of_channels
        tracked = (none, none) if mean is None or var is None else (mean.clone(), var.clone())
        found = (y if bias is None else y + bias).to(x.dtype), seen, torch.zeros_like(seen), *tracked
    elif x.shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(x.shape)}")
    elif mean is None or var is None:
        found = *torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps), none, none
    else:
        found = torch.ops.aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, momentum, eps)
    y = found[0] if residual is None else found[0] + residual
    return (y if slope == 1 else torch.nn.functional.leaky_relu(y, slope) if slope else torch.relu(y)), *found[1:]


def _norm_of_live_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    count: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    live, rows = _live(x, count)[:, None], count.to(wide.dtype)
    seen = _masked(wide, live).sum(0) / rows
    off = _masked(wide - seen, live)
    spread = off.square().sum(0) / rows
    std = torch.rsqrt(spread + eps)
    y = off * std
    y = y if weight is None else y * weight
    y = _masked(y if bias is None else y + bias, live).to(x.dtype)
    if mean is None or var is None:
        return y, seen, std, x.new_empty(0), x.new_empty(0)
    unbiased = spread * (rows / (rows - 1))
    next_mean = torch.lerp(mean, seen.to(mean.dtype), momentum)
    return y, seen, std, next_mean, torch.lerp(var, unbiased.to(var.dtype), momentum)


@implement("batch_norm")
def _batch_norm(*given: Any) -> tuple[torch.Tensor, ...]:
    return batch_norm(*given)


@implement("batch_norm_back")
def _batch_norm_back(*given: Any) -> tuple[torch.Tensor, ...]:
    return batch_norm_back(*given)


def batch_norm_back(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_std: torch.Tensor | None,
    count: torch.Tensor,
    training: bool,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `batch_norm` by x, weight and bias."""
    none = x.new_empty(0)
    if len(x) and not has_dead_rows(x):  # torch divides by the number of rows
        given = grad, x, weight, mean, var, saved_mean, saved_std, training, eps, mask
        found: Any = torch.ops.aten.native_batch_norm_backward(*given)
        return tuple(none if t is None else t for t in found)  # type: ignore[return-value]
    if training and saved_mean is not None and saved_std is not None:
        back = norm_back_of_kernels(grad, x, None, weight, weight, saved_mean, saved_std, count, eps, 1.0)
        if back is not None:
            return back[:3]
    kind = torch.promote_types(x.dtype, torch.float32)
    live, rows = _live(x, count)[:, None], count.to(kind)
    centre: Any = saved_mean if training else mean
    std: Any = saved_std if training or var is None else torch.rsqrt(var + eps)
    g, normal = _masked(grad.to(kind), live), _masked((x.to(kind) - centre) * std, live)
    of_weight, of_bias = (g * normal).sum(0), g.sum(0)
    of_x = g
    if training:
        of_x = g - of_bias / rows - normal * (of_weight / rows)
    of_x = of_x * std if weight is None else of_x * (std * weight)
    like = x if weight is None else weight
    return _masked(of_x, live).to(x.dtype), of_weight.to(like.dtype), of_bias.to(like.dtype)


def norm_back_of_kernels(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    std: torch.Tensor,
    count: torch.Tensor,
    eps: float,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Gradients of `batch_norm` by x, weight, bias and residual, in two launches; None where kernels do not serve.

    ``y`` is the result, where a residual was added before the activation.
    """
    kernels = _norm_kernels(x, weight, weight)
    if kernels is None:
        return None
    x, norm, c = x.contiguous(), kernels.Norm(eps, 0.0, slope, None, count), x.shape[1]
    size = kernels._kernels_of(x, weight, norm).size
    whole = mean.untyped_storage().nbytes() - 4 * mean.storage_offset() >= 4 * size
    if whole and std.data_ptr() == mean.data_ptr() + 4 * c:  # the workspace of the forward pass, as it kept it
        kept = mean.as_strided((size,), (1,))
    else:
        kept = torch.empty(size, dtype=torch.float32, device=x.device)
        torch.cat([mean, std], out=kept[: 2 * c])
    dx, dw, db, dz = kernels.backward(grad, x, y, weight, bias, kept, norm)
    none = x.new_empty(0)
    return dx, none if dw is None else dw, none if db is None else db, dz


@shape_of("convolve")
def _(plan, x, weight, bias, rows, groups, adjoint):  # type: ignore[no-untyped-def]
    takes = weight.shape[2] if adjoint else weight.shape[1] * groups
    check_in_trace(x.shape[1] == takes, lambda: f"x has {x.shape[1]} channels, and the weight takes {takes}")
    return x.new_empty((rows, weight.shape[1] * groups if adjoint else weight.shape[2]))


shape_of("weight_grad")(lambda plan, x, grad, taps, groups: x.new_empty((taps, x.shape[1] // groups, grad.shape[1])))
shape_of("from_dense")(lambda grid, dense, rows, start: dense.new_empty((rows, dense.shape[1])))
shape_of("max_pick")(lambda plan, grad, winners, onto: _rows_onto(grad, onto))
shape_of("spread_items")(lambda grid, values, rows: values.new_empty((rows, values.shape[1])))
shape_of("max_items")(
    lambda grid, x, items: (x.new_empty((items, x.shape[1])), x.new_empty((items, x.shape[1]), dtype=torch.int64))
)
shape_of("unmax_items")(lambda grid, values, winners, rows: values.new_empty((rows, values.shape[1])))
shape_of("pick_items")(lambda grid, x, winners: x.new_empty(winners.shape))
shape_of("rows")(lambda x: x.new_empty(1, dtype=torch.int32))
shape_of("live")(lambda x, count: x.new_empty(x.shape[0], dtype=torch.bool))
shape_of("filled")(lambda x, count, axis, fill: torch.empty_like(x))
_library_shapes = {"number.int": torch.int64, "number.float": torch.float64}
for _name, _dtype in _library_shapes.items():
    shape_of(_name)(lambda like, value, _dtype=_dtype: like.new_empty((), dtype=_dtype))
shape_of("arithmetic")(
    lambda function, numbers, constants, floating: numbers[0].new_empty((), dtype=torch.float64 if floating else None)
)


@shape_of("mean_rows")
def _(x, count, axis, dims, keepdim):  # type: ignore[no-untyped-def]
    return x.mean(dims, keepdim)


@shape_of("batch_norm")
def _(x, weight, bias, mean, var, count, momentum, eps, single):  # type: ignore[no-untyped-def]
    of_channels = x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    tracked = (x.new_empty(0), x.new_empty(0)) if mean is None else (torch.empty_like(mean), torch.empty_like(var))
    return torch.empty_like(x), of_channels, torch.empty_like(of_channels), *tracked


@shape_of("batch_norm_back")
def _(grad, x, weight, mean, var, saved_mean, saved_std, count, training, eps, mask):  # type: ignore[no-untyped-def]
    like = x if weight is None else weight
    return torch.empty_like(x), like.new_empty(x.shape[1]), like.new_empty(x.shape[1])


def _derivative(name: str, keep: Any, back: Any) -> None:
    """Register the derivative of an operator; ``keep(ctx, inputs, output)`` saves what ``back(ctx, *grads)`` reads."""
    torch.library.register_autograd(f"sparseconv::{name}", back, setup_context=keep, lib=_library)


def _keep_convolve(ctx: Any, inputs: tuple, output: Any) -> None:
    plan, x, weight, _, _, ctx.groups, ctx.adjoint = inputs
    ctx.save_for_backward(plan, x, weight)
    ctx.rows = x.shape[0]


def _back_convolve(ctx: Any, grad: torch.Tensor) -> tuple:
    (plan, x, weight), (_, of_x, of_weight, of_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
    grad_x = grad_weight = None
    if of_weight:
        fine, coarse = (grad, x) if ctx.adjoint else (x, grad)
        grad_weight = _ops.weight_grad(plan, fine, coarse, weight.shape[0], ctx.groups)
    if of_x:
        grad_x = _ops.convolve(plan, grad, weight, None, ctx.rows, ctx.groups, not ctx.adjoint)
    return None, grad_x, grad_weight, grad.sum(0) if of_bias else None, None, None, None


def _keep_weight_grad(ctx: Any, inputs: tuple, output: Any) -> None:
    plan, x, grad, _, ctx.groups = inputs
    ctx.save_for_backward(plan, x, grad)
    ctx.sizes = x.shape[0], grad.shape[0]


def _back_weight_grad(ctx: Any, cotangent: torch.Tensor) -> tuple:
    (plan, x, grad), (_, of_x, of_grad, *_), (fine, coarse) = ctx.saved_tensors, ctx.needs_input_grad, ctx.sizes
    grad_x = _ops.convolve(plan, grad, cotangent, None, fine, ctx.groups, True) if of_x else None
    grad_grad = _ops.convolve(plan, x, cotangent, None, coarse, ctx.groups, False) if of_grad else None
    return None, grad_x, grad_grad, None, None


def _keep_to_dense(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, x, ctx.items, ctx.start, ctx.shape = inputs
    ctx.save_for_backward(grid)
    ctx.rows = x.shape[0]


def _back_to_dense(ctx: Any, grad: torch.Tensor) -> tuple:
    return None, _ops.from_dense(ctx.saved_tensors[0], grad, ctx.rows, ctx.start), None, None, None


def _keep_from_dense(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, dense, _, ctx.start = inputs
    ctx.save_for_backward(grid)
    ctx.items, ctx.shape = dense.shape[0], dense.shape[2:]


def _back_from_dense(ctx: Any, grad: torch.Tensor) -> tuple:
    return None, _ops.to_dense(ctx.saved_tensors[0], grad, ctx.items, ctx.start, ctx.shape), None, None


def _keep_batch_norm(ctx: Any, inputs: tuple, output: Any) -> None:
    x, weight, _, _, _, count, _, ctx.eps, _ = inputs
    _, mean, std, *tracked = output
    ctx.save_for_backward(x, weight, mean, std, count)
    ctx.mark_non_differentiable(mean, std, *tracked)


def _norm_again(x: torch.Tensor, weight: Any, grad: torch.Tensor, eps: float, of_bias: bool) -> tuple:
    """Gradients of a batch norm over all rows that can be differentiated again."""
    if x.shape[0] < 2:
        y = (x - x) if weight is None else (x - x) * weight.to(x.dtype)
    else:
        y = torch.batch_norm(x, weight, None, None, None, True, 0.0, eps, False)
    wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
    found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, grad, create_graph=True) if wanted else ()))
    return found.get(id(x)), found.get(id(weight)), grad.sum(0) if of_bias else None


def _back_batch_norm(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple:
    x, weight, mean, std, count = ctx.saved_tensors
    of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():  # its own derivative is wanted
        return *_norm_again(x, weight, grad, ctx.eps, of_bias), None, None, None, None, None, None
    mask = [of_x, of_weight, of_bias]
    dx, dw, db = _ops.batch_norm_back(grad, x, weight, None, None, mean, std, count, True, ctx.eps, mask)
    wanted = dx if of_x else None, dw if of_weight else None, db if of_bias else None
    return *wanted, None, None, None, None, None, None


def _keep_pool(ctx: Any, inputs: tuple, output: Any) -> None:
    plan, x, onto, ctx.how = inputs
    ctx.save_for_backward(plan, x, onto)


def _back_pool(ctx: Any, grad: torch.Tensor) -> tuple:
    plan, x, onto = ctx.saved_tensors
    back, how = _ops.transposed(plan), ctx.how
    if how == "average":  # a sum over the voxels that each output sees, divided by how many they are
        ones = torch.ones((x.shape[0], 1), dtype=grad.dtype, device=grad.device)
        grad, how = grad / _ops.pool(plan, ones, onto, "sum").clamp_min(1), "sum"
    return None, _ops.pool(back, grad, x, how), None, None


def _keep_max_pool(ctx: Any, inputs: tuple, output: Any) -> None:
    plan, x, _ = inputs
    ctx.save_for_backward(plan, x, output[1])
    ctx.mark_non_differentiable(output[1])


def _back_max_pool(ctx: Any, grad: torch.Tensor, _: Any) -> tuple:
    plan, x, winners = ctx.saved_tensors
    return None, _ops.max_unpool(_ops.transposed(plan), grad, winners, x), None


def _keep_max_unpool(ctx: Any, inputs: tuple, output: Any) -> None:
    plan, x, winners, onto = inputs
    ctx.save_for_backward(plan, x, winners, onto)


def _back_max_unpool(ctx: Any, grad: torch.Tensor) -> tuple:
    plan, x, winners, _ = ctx.saved_tensors
    return None, _ops.max_pick(plan, grad, winners, x), None, None


def _back_max_pick(ctx: Any, grad: torch.Tensor) -> tuple:
    plan, x, winners, _ = ctx.saved_tensors
    return None, _ops.max_unpool(plan, grad, winners, x), None, None


def _keep_pool_items(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, x, ctx.items, ctx.how = inputs
    ctx.save_for_backward(grid, x)


def _back_pool_items(ctx: Any, grad: torch.Tensor) -> tuple:
    (grid, x), items = ctx.saved_tensors, ctx.items
    if ctx.how == "max":
        raise RuntimeError("a maximum over batch items is differentiated as max_items")
    if ctx.how == "average":
        ones = torch.ones((x.shape[0], 1), dtype=grad.dtype, device=grad.device)
        grad = grad / _ops.pool_items(grid, ones, items, "sum").clamp_min(1)
    return None, _ops.spread_items(grid, grad, x.shape[0]), None, None


def _keep_spread_items(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, values, _ = inputs
    ctx.save_for_backward(grid)
    ctx.items = values.shape[0]


def _back_spread_items(ctx: Any, grad: torch.Tensor) -> tuple:
    return None, _ops.pool_items(ctx.saved_tensors[0], grad, ctx.items, "sum"), None


def _keep_max_items(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, x, _ = inputs
    ctx.save_for_backward(grid, output[1])
    ctx.rows = x.shape[0]
    ctx.mark_non_differentiable(output[1])


def _back_max_items(ctx: Any, grad: torch.Tensor, _: Any) -> tuple:
    grid, winners = ctx.saved_tensors
    return None, _ops.unmax_items(grid, grad, winners, ctx.rows), None


def _keep_unmax_items(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, _, winners, _ = inputs
    ctx.save_for_backward(grid, winners)


def _back_unmax_items(ctx: Any, grad: torch.Tensor) -> tuple:
    grid, winners = ctx.saved_tensors
    return None, _ops.pick_items(grid, grad, winners), None, None


def _keep_pick_items(ctx: Any, inputs: tuple, output: Any) -> None:
    grid, x, winners = inputs
    ctx.save_for_backward(grid, winners)
    ctx.rows = x.shape[0]


def _back_pick_items(ctx: Any, grad: torch.Tensor) -> tuple:
    grid, winners = ctx.saved_tensors
    return None, _ops.unmax_items(grid, grad, winners, ctx.rows), None


_derivative("max_items", _keep_max_items, _back_max_items)
_derivative("unmax_items", _keep_unmax_items, _back_unmax_items)
_derivative("pick_items", _keep_pick_items, _back_pick_items)
_derivative("pool", _keep_pool, _back_pool)
_derivative("max_pool", _keep_max_pool, _back_max_pool)
_derivative("max_unpool", _keep_max_unpool, _back_max_unpool)
_derivative("max_pick", _keep_max_unpool, _back_max_pick)
_derivative("pool_items", _keep_pool_items, _back_pool_items)
_derivative("spread_items", _keep_spread_items, _back_spread_items)
_derivative("batch_norm", _keep_batch_norm, _back_batch_norm)
_derivative("convolve", _keep_convolve, _back_convolve)
_derivative("weight_grad", _keep_weight_grad, _back_weight_grad)
_derivative("to_dense", _keep_to_dense, _back_to_dense)
_derivative("from_dense", _keep_from_dense, _back_from_dense)
