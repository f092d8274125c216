"""Pooling over the edges of a plan, and its inverses.

    sum:  y[o] = sum over edges (k, i, o) of x[i]
    avg:  y[o] = sum / (edges of o), so that absent voxels do not count
    max:  y[o] = max over edges (k, i, o) of x[i], channel by channel; of equal ones the first tap wins

An output without edges is 0, the value that an absent voxel has in a dense array, and takes no gradient. Sums are a
`sparse_scale` over the edges by output row, and a mean is a sum divided once. Maxima and what goes back through them go
by taps, each a partial injection; on a GPU one launch does all taps. No atomics anywhere: the same bits in every run.
Halves are accumulated in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sparseconv import transforms
from sparseconv.autograd_function import Function
from sparseconv.checks import check_tensor
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.ops.rows import check_plan, check_rows, kept, on_kernels, recorder, wide
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.products import SparseScaleInfo, sparse_scale
from sparseconv.products.info import known_right

if TYPE_CHECKING:
    from jaxtyping import Float, Integer


def sum_pool(x: Float[torch.Tensor, "N_in C"], plan: ConvolutionPlan) -> Float[torch.Tensor, "N_out C"]:
    """The sum over the voxels in each output's window.

    Args:
        x: (N_in, C) floating point on the plan's device, rows in the order of ``plan.source``.
        plan: any plan; its groups and backend do not matter.

    Returns:
        (N_out, C) in the order of ``plan.target``, dtype of x; differentiable to any order, the adjoint being the sum
        over ``plan.transpose()``.

    Raises:
        ValueError: shape or device of x do not fit the plan. TypeError: x is not floating point.

    >>> from sparseconv import VoxelGrid
    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 5]]))
    >>> sum_pool(torch.tensor([[1.0], [2.0], [4.0]]), ConvolutionPlan(grid, 2, stride=2)).tolist()
    [[3.0], [4.0]]
    """
    if (traced := recorder(plan)) is not None:
        return traced.pooled(x, "sum")
    x, plan = _local(x, plan)
    return edge_sum(x, plan.kernel_map)


def avg_pool(
    x: Float[torch.Tensor, "N_in C"], plan: ConvolutionPlan, *, count_absent: bool = False
) -> Float[torch.Tensor, "N_out C"]:
    """The mean over the voxels in each output's window; with ``count_absent``, the sum divided by the number of taps.

    Arguments, results and errors are those of `sum_pool`. ``count_absent=True`` equals torch's dense average pooling of
    zeros where there is no voxel.

    >>> from sparseconv import VoxelGrid
    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 5]]))
    >>> avg_pool(torch.tensor([[1.0], [2.0], [4.0]]), ConvolutionPlan(grid, 2, stride=2)).tolist()
    [[1.5], [4.0]]
    """
    if (traced := recorder(plan)) is not None:
        return traced.pooled(x, "average_of_taps" if count_absent else "average")
    x, plan = _local(x, plan)
    if plan.kernel_map.reverse().meets_all and not count_absent:
        return edge_sum(x, plan.kernel_map)  # of one voxel each
    total = edge_sum(x.to(wide(x)), plan.kernel_map)
    return (total / (plan.num_taps if count_absent else _degrees(plan.kernel_map))).to(x.dtype)


def max_pool(
    x: Float[torch.Tensor, "N_in C"], plan: ConvolutionPlan
) -> tuple[Float[torch.Tensor, "N_out C"], Integer[torch.Tensor, "N_out C"]]:
    """The maximum over the voxels in each output's window, and the tap of each maximum.

    Arguments and errors are those of `sum_pool`. NaN wins, as in torch.

    Returns:
        (y (N_out, C), dtype of x; winners (N_out, C) int16, or int32 past 32,767 taps: the tap of each maximum, -1
        where there is no edge). y is differentiable to any order.

    >>> from sparseconv import VoxelGrid
    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 5]]))
    >>> y, winners = max_pool(torch.tensor([[1.0], [2.0], [-4.0]]), ConvolutionPlan(grid, 2, stride=2))
    >>> y.tolist(), winners.tolist()
    ([[2.0], [-4.0]], [[1], [1]])
    """
    if (traced := recorder(plan)) is not None:
        return traced.max_pooled(x)
    x, plan = _local(x, plan)
    return edge_max(x, plan.kernel_map)


def unpool(x: Float[torch.Tensor, "N_in C"], plan: ConvolutionPlan) -> Float[torch.Tensor, "N_out C"]:
    """Copy coarse voxels onto the fine ones that they were made from: nearest-neighbor upsampling.

    Args:
        x: (N_coarse, C).
        plan: from coarse to fine, ``pooling_plan.transpose()`` or `ConvolutionPlan.transposed`.

    Returns:
        (N_fine, C). A fine voxel that several windows hold (kernel larger than stride) gets their mean, one that none
        holds gets 0. Errors are those of `sum_pool`.

    >>> from sparseconv import VoxelGrid
    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 5]]))
    >>> unpool(torch.tensor([[1.0], [2.0]]), ConvolutionPlan(grid, 2, stride=2).transpose()).tolist()
    [[1.0], [1.0], [2.0]]
    """
    return avg_pool(x, plan)


def max_unpool(
    x: Float[torch.Tensor, "N_in C"], winners: Integer[torch.Tensor, "N_in C"], plan: ConvolutionPlan
) -> Float[torch.Tensor, "N_out C"]:
    """Put values back where `max_pool` found them, and 0 elsewhere: the adjoint of that selection.

    Args:
        x: (N_coarse, C).
        winners: (N_coarse, C), from `max_pool`.
        plan: from coarse to fine, the transpose of the pooling's plan.

    Returns:
        (N_fine, C). Where windows overlap and chose the same voxel, their values add up. Linear in x.

    Raises:
        ValueError: shapes or devices that do not fit. TypeError: x is not floating point, or winners no integers.

    >>> from sparseconv import VoxelGrid
    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 5]]))
    >>> plan = ConvolutionPlan(grid, 2, stride=2)
    >>> y, winners = max_pool(torch.tensor([[1.0], [2.0], [-4.0]]), plan)
    >>> max_unpool(y, winners, plan.transpose()).tolist()
    [[0.0], [2.0], [-4.0]]
    """
    check_plan(plan)
    check_tensor("x", x)
    check_tensor("winners", winners)
    if winners.is_floating_point() or winners.dtype == torch.bool:
        raise TypeError(f"winners must be the integers that max_pool returned; got {winners.dtype}")
    if winners.shape != x.shape or winners.device != x.device:
        raise ValueError(
            f"winners must be {tuple(x.shape)} on {x.device} like x; got {tuple(winners.shape)} on {winners.device}"
        )
    if (traced := recorder(plan)) is not None:
        return traced.max_unpooled(x, winners)
    if getattr(plan.source, "is_shared", False):
        raise ValueError("max_unpool over shards needs the winners of other ranks: use unpool, or gather the scene")
    x, plan = _local(x, plan)
    return _winner_sum(x, winners, plan.kernel_map, False, False)


def picked(x: torch.Tensor, winners: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
    """The adjoint of `max_unpool` over ``plan``: fine values (N_out, C) where the winners (N_in, C) are, (N_in, C)."""
    return _winner_sum(x, winners, plan.kernel_map, True, True)


def edge_sum(x: torch.Tensor, kernel_map: KernelMap) -> torch.Tensor:
    """y[o] = sum over edges (k, i, o) of x[i]: (N_in, C) -> (N_out, C)."""
    if _by_kernel(x) and kernel_map.reverse().meets_all:
        return _winner_sum(x, None, kernel_map, False, False)
    with torch.autocast(x.device.type, enabled=False):  # as torch's pooling, which keeps the dtype of x
        return sparse_scale(x, *_sum_infos(kernel_map))


class _WinnerSum(Function):
    """A sum over the edges of the winning taps; its own derivative with the edges reversed.

    ``winners`` (rows of one side, C) names a tap for each row and channel; an edge counts where it is the edge's tap.
    Without them all edges count.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, winners: torch.Tensor | None, kernel_map: KernelMap, adjoint: bool, at_target: bool
    ) -> torch.Tensor:
        if winners is None or kernel_map.padded or _by_kernel(x):
            return _chosen_sum(x, winners, kernel_map.reverse() if adjoint else kernel_map, at_target)
        rows = kernel_map.num_in if adjoint else kernel_map.num_out
        y = torch.zeros((rows, x.shape[1]), dtype=wide(x), device=x.device)
        for tap, ins, outs in _by_tap(kernel_map):
            sources, targets = (outs, ins) if adjoint else (ins, outs)
            chosen = winners.index_select(0, targets if at_target else sources) == tap
            y.index_add_(0, targets, kept(x.index_select(0, sources), chosen).to(y.dtype))
        return y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, winners, *ctx.rest = inputs
        ctx.save_for_backward(winners)
        ctx.save_for_forward(winners)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        kernel_map, adjoint, at_target = ctx.rest
        found = _winner_sum(grad, ctx.saved_tensors[0], kernel_map, not adjoint, not at_target)
        return found, None, None, None, None


class _Max(Function):
    """The maximum over edges and its taps; the derivative is the sum over the winning edges alone."""

    @staticmethod
    def forward(x: torch.Tensor, kernel_map: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (kernel_map.num_out, x.shape[1])
        index = torch.int16 if kernel_map.num_taps < 2**15 else torch.int32
        if kernel_map.padded or _by_kernel(x):
            return _largest(x, kernel_map, index)
        first = torch.full((kernel_map.num_out, 1), -1, dtype=index, device=x.device)
        for tap, _, outs in reversed(list(_by_tap(kernel_map))):
            first.index_fill_(0, outs, tap)
        values = torch.full(shape, -torch.inf, dtype=x.dtype, device=x.device).masked_fill_(first < 0, 0)
        winners = first.expand(shape).contiguous()
        for tap, ins, outs in _by_tap(kernel_map):
            new, best, taps = x.index_select(0, ins), values.index_select(0, outs), winners.index_select(0, outs)
            worse = ((new > best) | (new != new)).logical_not_()
            values.index_copy_(0, outs, torch.maximum(new, best))  # which hands NaN on
            winners.index_copy_(0, outs, taps.sub_(tap).mul_(worse).add_(tap))
        return values, winners

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.kernel_map = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple:
        return _winner_sum(grad, ctx.saved_tensors[0], ctx.kernel_map, True, False), None


class _SeenWinnerSum(_WinnerSum):
    """The same with rules for tangents and batches, which tracing must not see."""

    @staticmethod
    def jvp(ctx: Any, along: torch.Tensor, *_: None) -> torch.Tensor:
        return _winner_sum(along, ctx.saved_tensors[0], *ctx.rest)

    @staticmethod
    def vmap(info: Any, dims: tuple, x: torch.Tensor, winners: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        y = _winner_sum(*(transforms.stack_channels(t, dim, size) for t, dim in zip((x, winners), dims)), *rest)
        return transforms.unstack_channels(y, size, x, dims[0]), 1


class _SeenMax(_Max):
    """The same with rules for tangents and batches, which tracing must not see."""

    @staticmethod
    def jvp(ctx: Any, along: torch.Tensor, _: None) -> tuple:
        return _winner_sum(along, ctx.saved_tensors[0], ctx.kernel_map, False, True), None

    @staticmethod
    def vmap(info: Any, dims: tuple, x: torch.Tensor, kernel_map: KernelMap) -> tuple[tuple, tuple[int, int]]:
        size = info.batch_size
        found = edge_max(transforms.stack_channels(x, dims[0], size), kernel_map)
        return tuple(transforms.unstack_channels(t, size, x, dims[0]) for t in found), (1, 1)


def _winner_sum(*args: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():  # it differentiates the operations; torch 2.11's loses the function's gradient
        return _WinnerSum.forward(*args)
    transforms.check_no_batch(args[0])
    return (_SeenWinnerSum if transforms.active() else _WinnerSum).apply(*args)


def edge_max(x: Any, kernel_map: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum over edges for each output row (N_out, C), and the taps of the winners; see `max_pool`."""
    if torch.compiler.is_compiling():
        winners = _Max.forward(x.detach(), kernel_map)[1]
        return _winner_sum(x, winners, kernel_map, False, True), winners
    return (_SeenMax if transforms.active() else _Max).apply(x, kernel_map)


def _by_kernel(x: torch.Tensor) -> bool:
    """Whether kernels serve features of this kind where they are."""
    return x.element_size() > 1 and on_kernels(x)


def _seen(edges: KernelMap) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each tap with the input row of every output row, any where there is none, and which of them are real (N_out, 1).

    For edges that the CPU cannot count; nothing is scattered.
    """
    for tap, rows in enumerate(edges.neighbors):
        yield tap, rows.clamp_min(0), (rows >= 0)[:, None]


def _chosen_sum(x: torch.Tensor, winners: torch.Tensor | None, edges: KernelMap, at_target: bool) -> torch.Tensor:
    """`_WinnerSum` onto the output rows of edges, which the CPU need not count."""
    if _by_kernel(x):
        from sparseconv.ops.gpu.pooling import chosen_sum  # Triton is loaded where it is used

        return chosen_sum(x, winners, edges.neighbors, at_target)
    if winners is None:
        return edge_sum(x, edges)
    y = torch.zeros((edges.num_out, x.shape[1]), dtype=wide(x), device=x.device)
    for tap, rows, real in _seen(edges):
        chosen = (winners if at_target else winners.index_select(0, rows)) == tap
        y += torch.where(real & chosen, x.index_select(0, rows), 0)
    return y.to(x.dtype)


def _largest(x: torch.Tensor, edges: KernelMap, index: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`_Max` over edges, which the CPU need not count."""
    if _by_kernel(x):
        from sparseconv.ops.gpu.pooling import largest  # Triton is loaded where it is used

        return largest(x, edges.neighbors, index)
    values = torch.zeros((edges.num_out, x.shape[1]), dtype=x.dtype, device=x.device)
    winners = torch.full(values.shape, -1, dtype=index, device=x.device)
    for tap, rows, real in _seen(edges):
        new = x.index_select(0, rows)
        better = real & ((winners < 0) | (new > values) | (new != new))
        values, winners = torch.where(better, new, values), winners.masked_fill(better, tap)
    return values, winners


def _by_tap(kernel_map: KernelMap) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each live tap with its input and output rows, neither of which repeats within a tap.

    Rows are widened to int64 here: with int32, torch's index_add_ takes four times as long on the CPU.
    """
    ends = 0
    for tap, count in enumerate(kernel_map.tap_counts):
        start, ends = ends, ends + count
        if count:
            yield tap, kernel_map.in_rows[start:ends].long(), kernel_map.out_rows[start:ends].long()


@transforms.constant
def _sum_infos(kernel_map: KernelMap) -> tuple[SparseScaleInfo, SparseScaleInfo]:
    """The sum over a map's edges and its adjoint; kept with the map."""
    infos = kernel_map.prepared.get("sum_infos")
    if infos is None:
        there, back = (_sum_info(edges) for edges in (kernel_map, kernel_map.reverse()))
        infos = there, back
        if not torch.compiler.is_compiling():
            kernel_map.prepared["sum_infos"] = infos
    return infos


def _sum_info(edges: KernelMap) -> SparseScaleInfo:
    if edges.padded:
        seen = edges.neighbors.t()
        bounds, real = _bounds(edges), (seen >= 0).flatten()
        place = torch.where(real, real.cumsum(0) - 1, real.numel())  # the absent ones meet behind the last
        rows = seen.new_zeros(real.numel() + 1).scatter_(0, place, seen.flatten().clamp_min(0))
        return known_right(SparseScaleInfo, None, rows[:-1], bounds, None, edges.num_out, edges.num_in)
    order, bounds = edges.by_output
    return known_right(SparseScaleInfo, None, edges.in_rows[order], bounds, None, edges.num_out, edges.num_in)


def _bounds(edges: KernelMap) -> torch.Tensor:
    """(N_out+1,) int64: where the edges of each output row begin, which the CPU cannot count."""
    bounds = torch.zeros(edges.num_out + 1, dtype=torch.int64, device=edges.device)
    torch.cumsum((edges.neighbors >= 0).sum(0), 0, out=bounds[1:])
    return bounds


@transforms.constant
def _degrees(kernel_map: KernelMap) -> torch.Tensor:
    """(N_out, 1) fp32: edges of each output, at least 1; kept with the map."""
    degrees = kernel_map.prepared.get("degrees")
    if degrees is None:
        bounds = _bounds(kernel_map) if kernel_map.padded else kernel_map.by_output[1]
        degrees = bounds.diff()[:, None].clamp_min(1).float()
        if not torch.compiler.is_compiling():
            kernel_map.prepared["degrees"] = degrees
    return degrees


def _local(x: torch.Tensor, plan: ConvolutionPlan) -> tuple[torch.Tensor, ConvolutionPlan]:
    """x and the plan, checked; of a sharded scene, with what this rank's outputs see of other ranks."""
    check_plan(plan)
    check_rows("x", x, plan.num_in, "voxel of the plan's source", plan.device, "the plan")
    return plan.localize(x)
