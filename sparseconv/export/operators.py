"""Geometry as operators on tensors, so that a saved program finds its own maps wherever it runs.

A grid or a plan travels between operators as a handle: an int64 tensor (1,) on the CPU, made while the program runs.
Its memory owns the object, which lives as long as the tensor. A number that another process wrote down names nothing.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from typing import Any, TypeVar

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, IndexRange
from sparseconv.kinds import check_choice
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.shared import shared_plan
from sparseconv.plan.within import plan_within

Kind = TypeVar("Kind", VoxelGrid, ConvolutionPlan)

_numbers = itertools.count(1 + secrets.randbits(61))
_owners: weakref.WeakValueDictionary[int, _Owner] = weakref.WeakValueDictionary()

#: the operators; cpp/operators.cpp offers the same to programs without Python
SCHEMAS = (
    "grid(Tensor coords, int items, float[] voxel_size, float[] origin) -> Tensor",
    "subset(Tensor grid, Tensor mask, Tensor coords) -> (Tensor, Tensor)",
    "lookup(Tensor grid, Tensor coords) -> Tensor",
    "to_dense(Tensor grid, Tensor x, int items, int[] start, int[] shape) -> Tensor",
    "pool_items(Tensor grid, Tensor x, int items, str how) -> Tensor",
    "standardise_items(Tensor grid, Tensor x, int groups, float eps) -> Tensor",
    "plan(Tensor source, Tensor? target, int[]? kernel_size, int[] taps, int[] stride, int[] dilation, int[]? padding,"
    " str outputs, int[] shape, str boundary, int[] extent, str backend) -> Tensor",
    "transposed(Tensor plan) -> Tensor",
    "target(Tensor plan, Tensor coords) -> (Tensor, Tensor)",
    "execute(Tensor plan, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor onto, int groups,"
    " str activation, float[] numbers) -> Tensor",
    "pool(Tensor plan, Tensor x, Tensor onto, str how) -> Tensor",
    "max_pool(Tensor plan, Tensor x, Tensor onto) -> (Tensor, Tensor)",
    "max_unpool(Tensor plan, Tensor x, Tensor winners, Tensor onto) -> Tensor",
)

_library = torch.library.Library("sparseconv", "FRAGMENT")
for _schema in SCHEMAS:
    _library.define(_schema)


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
    owner = _owners.get(int(given))
    found = None if owner is None else owner.held[0]
    if not isinstance(found, kind):
        raise ValueError(
            f"this handle stands for {'nothing here' if found is None else found}, and {kind.__name__} is wanted: a "
            "handle lives as long as its tensor, in the process that made it"
        )
    return found


def _implement(name: str) -> Any:
    """Register a function as what the operator of this name does, on every device."""

    def register(function: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        _library.impl(name, run, "CompositeExplicitAutograd")
        return function

    return register


def _shape_of(name: str) -> Any:
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


@_implement("grid")
def _grid(coords: torch.Tensor, items: int, voxel_size: list[float], origin: list[float]) -> torch.Tensor:
    own = coords.clone()  # a compiler may write into what it was given
    return handle((VoxelGrid(own, items, tuple(voxel_size or ()) or None, tuple(origin or ()) or None),))


@_implement("subset")
def _subset(grid: torch.Tensor, mask: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _grid_and_coords(held_by(grid, VoxelGrid).subset(mask))


@_implement("lookup")
def _lookup(grid: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    return held_by(grid, VoxelGrid).lookup(coords)


@_implement("to_dense")
def _to_dense(grid: torch.Tensor, x: torch.Tensor, items: int, start: list[int], shape: list[int]) -> torch.Tensor:
    box = IndexRange(tuple(start), [a + n for a, n in zip(start, shape)])
    return held_by(grid, VoxelGrid).to_dense(x, box).contiguous()


@_implement("pool_items")
def _pool_items(grid: torch.Tensor, x: torch.Tensor, items: int, how: str) -> torch.Tensor:
    from sparseconv.ops import global_pooling  # loaded where it is used

    how_to = {
        "sum": global_pooling.global_sum_pool,
        "average": global_pooling.global_avg_pool,
        "max": global_pooling.global_max_pool,
    }
    check_choice("how", how, tuple(how_to))
    return how_to[how](x, held_by(grid, VoxelGrid))


@_implement("standardise_items")
def _standardise_items(grid: torch.Tensor, x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    from sparseconv.ops.items import standardised

    found = held_by(grid, VoxelGrid)
    if x.ndim != 2 or len(x) != len(found) or x.shape[1] % max(1, groups) or groups < 1:
        raise ValueError(f"x must be ({len(found)}, C), C a multiple of {groups}; got {tuple(x.shape)}")
    y = standardised(x, found, groups, eps)
    return x.clone() if y is x else y  # no result shares an operand's memory


_shape_of("grid")(_some_handle)
_shape_of("subset")(lambda grid, mask, coords: _some_voxels(coords))
_shape_of("lookup")(lambda grid, coords: coords.new_empty(coords.shape[0], dtype=torch.int64))
_shape_of("to_dense")(lambda grid, x, items, start, shape: x.new_empty((items, x.shape[1], *shape)))
_shape_of("standardise_items")(lambda grid, x, groups, eps: torch.empty_like(x))
_shape_of("pool_items")(lambda grid, x, items, how: x.new_empty((items, x.shape[1])))


# ---- plans


@_implement("plan")
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
        plan = plan_within(grid, tuple(shape), tuple(kernel_size or ()), **window)
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


@_implement("transposed")
def _transposed(plan: torch.Tensor) -> torch.Tensor:
    back = held_by(plan, ConvolutionPlan).transpose()
    return handle((back, back.source, back.target))


@_implement("target")
def _target(plan: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _grid_and_coords(held_by(plan, ConvolutionPlan).target)


@_implement("execute")
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


@_implement("pool")
def _pool(plan: torch.Tensor, x: torch.Tensor, onto: torch.Tensor, how: str) -> torch.Tensor:
    from sparseconv.ops import pooling

    check_choice("how", how, ("sum", "average", "average_of_taps"))
    ready = held_by(plan, ConvolutionPlan)
    if how == "sum":
        return pooling.sum_pool(x, ready)
    return pooling.avg_pool(x, ready, count_absent=how == "average_of_taps")


@_implement("max_pool")
def _max_pool(plan: torch.Tensor, x: torch.Tensor, onto: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from sparseconv.ops import pooling

    return pooling.max_pool(x, held_by(plan, ConvolutionPlan))


@_implement("max_unpool")
def _max_unpool(plan: torch.Tensor, x: torch.Tensor, winners: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    from sparseconv.ops import pooling

    return pooling.max_unpool(x, winners, held_by(plan, ConvolutionPlan))


def _rows_onto(x: torch.Tensor, onto: torch.Tensor, channels: int | None = None) -> torch.Tensor:
    return x.new_empty((onto.shape[0], x.shape[1] if channels is None else channels))


_shape_of("plan")(_some_handle)
_shape_of("transposed")(_some_handle)
_shape_of("target")(lambda plan, coords: _some_voxels(coords))
_shape_of("execute")(lambda plan, x, weight, bias, residual, onto, *_: _rows_onto(x, onto, weight.shape[2]))
_shape_of("pool")(lambda plan, x, onto, how: _rows_onto(x, onto))
_shape_of("max_pool")(lambda plan, x, onto: (_rows_onto(x, onto), _rows_onto(x, onto).to(torch.int16)))
_shape_of("max_unpool")(lambda plan, x, winners, onto: _rows_onto(x, onto))
