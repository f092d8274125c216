"""Affine maps whose scale and shift belong to the batch item of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.operations.arithmetic import multiply
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.schema import Derivative

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

INF = float("inf")
_ONE_HOT_LIMIT = 2**26  # elements of the (B, N) selection matrix above which rows are sorted instead


def segment_sum(x: torch.Tensor, item: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of the rows of each batch item, in a fixed order: out[b] = sum of x[n] over n with item[n] == b.

    Args:
        x: (N, C).
        item: (N,) integer in 0..count-1, in any order.
        count: B.

    Returns:
        (B, C) in fp32 (fp64 for fp64), the same bits in every run.
    """
    x = x if x.dtype is torch.float64 else x.float()
    if count * x.shape[0] <= _ONE_HOT_LIMIT:
        chosen = item.unsqueeze(0) == torch.arange(count, device=x.device, dtype=item.dtype).unsqueeze(1)
        finite = x.isfinite()
        flags = torch.cat([(x == INF) | x.isnan(), (x == -INF) | x.isnan()], 1)
        with torch.autocast(x.device.type, enabled=False):
            # 0 times infinity is no zero: what is not finite goes to its own item alone
            chosen = chosen.to(x.dtype)
            total = chosen @ x.where(finite, 0)
            up, down = ((chosen @ flags.to(x.dtype)) > 0).chunk(2, 1)
        return total + torch.where(up, INF, 0.0) + torch.where(down, -INF, 0.0)
    order = torch.argsort(item, stable=True)
    lengths = torch.bincount(item, minlength=count)
    return torch.segment_reduce(x[order], "sum", lengths=lengths, axis=0, unsafe=True)


def _scale_grad(grad: torch.Tensor, x: torch.Tensor, item: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = grad if grad.dtype is torch.float64 else grad.float()
    return segment_sum(multiply(wide, x), item.squeeze(-1), scale.shape[0])


def _shift_grad(grad: torch.Tensor, item: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return segment_sum(grad, item.squeeze(-1), shift.shape[0])


def _rows(table: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, item.squeeze(-1).long())  # which, unlike indexing, does not count from the end


batch_scale: PointwiseDynamicFunction = pointwise_dynamic(
    Deferred("sparseconv.pointwise.scalars.arithmetic", "batch_scale"),
    num_inputs=3,
    promotion_methods=[(0, 2, "DEFAULT")],
    gather={2: 1},
    reference=lambda x, item, scale: x * _rows(scale, item),
    derivative={
        0: Derivative(lambda grad, item, scale: batch_scale(grad, item, scale), "grad0", "in1", "in2"),
        2: Derivative(_scale_grad, "grad0", "in0", "in1", "in2"),
    },
    doc="x * scale[item]: x (N, C), item (N, 1) integer, scale (B, C).",
)

affine: PointwiseDynamicFunction = pointwise_dynamic(
    Deferred("sparseconv.pointwise.scalars.arithmetic", "batch_affine"),
    num_inputs=4,
    promotion_methods=[(0, 2, 3, "DEFAULT")],
    gather={2: 1, 3: 1},
    reference=lambda x, item, scale, shift: x * _rows(scale, item) + _rows(shift, item),
    derivative={
        0: Derivative(lambda grad, item, scale: batch_scale(grad, item, scale), "grad0", "in1", "in2"),
        2: Derivative(_scale_grad, "grad0", "in0", "in1", "in2"),
        3: Derivative(_shift_grad, "grad0", "in1", "in3"),
    },
    doc="x * scale[item] + shift[item]: x (N, C), item (N, 1) integer, scale and shift (B, C).",
)


def batch_affine(
    x: Float[torch.Tensor, "N C"],
    batch_index: Integer[torch.Tensor, " N"],
    scale: Float[torch.Tensor, "B C"],
    shift: Float[torch.Tensor, "B C"] | None = None,
) -> Float[torch.Tensor, "N C"]:
    """Each row of a jagged batch scaled and shifted by its item: out[n, c] = x[n, c] * scale[b, c] + shift[b, c].

    b = batch_index[n]. Scale and shift are read through the index, never expanded to N rows.

    Args:
        x: (N, C) features.
        batch_index: (N,) int32 or int64, values in 0..B-1, in any order; on a GPU they are not checked.
        scale: (B, C).
        shift: (B, C), or None.

    Returns:
        (N, C) of the common dtype. Gradients of scale and shift are summed in a fixed order, in fp32 (fp64 for fp64).

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: if batch_index is not of an integer dtype, or another argument is complex.

    Example:
        >>> batch_affine(torch.ones(3, 1), torch.tensor([0, 1, 1]), torch.tensor([[2.0], [3.0]]))
        tensor([[2.],
                [3.],
                [3.]])
    """
    if batch_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"batch_affine: batch_index is int32 or int64, but got {batch_index.dtype}")
    if x.dim() != 2 or batch_index.shape != x.shape[:1]:
        raise ValueError(
            f"batch_affine: x is (N, C) and batch_index (N,), but got {tuple(x.shape)} and {tuple(batch_index.shape)}"
        )
    for name, table in (("scale", scale), ("shift", shift)):
        if table is not None and (table.dim() != 2 or table.shape != (scale.shape[0], x.shape[1])):
            wanted = f"(B, {x.shape[1]}), with one B for scale and shift"
            raise ValueError(f"batch_affine: {name} is {wanted}, but got {tuple(table.shape)}")
    if any(t is not None and t.is_complex() for t in (x, scale, shift)):
        raise TypeError("batch_affine: x, scale and shift are real, but one is complex; pass torch.view_as_real(x)")
    item = batch_index.unsqueeze(1)
    return batch_scale(x, item, scale) if shift is None else affine(x, item, scale, shift)
