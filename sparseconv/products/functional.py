"""The public operations, one function a product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.products.classes import (
    SparseInner,
    SparseMatTVec,
    SparseMul,
    SparseOuter,
    SparseScale,
    SparseScaVec,
    SparseVecMat,
    SparseVecSca,
)
from sparseconv.products.info import SparseProductInfo, SparseScaleInfo

if TYPE_CHECKING:
    from jaxtyping import Float


def sparse_scale(
    x: Float[torch.Tensor, "... M_in C"],
    info: SparseScaleInfo,
    info_backward: SparseScaleInfo | None = None,
    *,
    out: Float[torch.Tensor, "... out_size C"] | None = None,
) -> Float[torch.Tensor, "... out_size C"]:
    """Sums scaled rows: a product with a sparse matrix along the rows of x, for every batch item and channel.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index[t], c]

    Args:
        x: (N, M_in, C), or (M_in, C) without a batch; any strides; fp16, bf16, fp32 or fp64.
        info: what is summed where, on the device of x; `sparse_scale_infos` makes it from index lists.
        info_backward: the transpose, needed where x requires a gradient.
        out: where to write the result, of its shape, dtype and device, with any strides that overlap nowhere. It is
            overwritten whole, rows that ``index_out`` does not list by zeros, and returned. Not differentiable.

    Returns:
        (N, out_size, C), or (out_size, C), in the dtype of x, summed in fp32 (fp64 for fp64); the same bits each run.
        Differentiable to any order. ``scale`` gets no gradient: where it should (weights of an interpolation at
        positions that are learnt), give it as the second input of `sparse_vecsca`.

    Raises:
        ValueError, TypeError: shapes, sizes, devices or dtypes that do not fit, or a missing info_backward; out with a
            gradient asked for. Nothing is written then.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_scale, sparse_scale_infos
        >>> infos = sparse_scale_infos([0, 1, 2], index_out=[0, 0, 1], scale=[0.5, 0.5, 1.0], out_size=2, in_size=3)
        >>> sparse_scale(torch.tensor([[1.0], [3.0], [5.0]]), *infos)
        tensor([[2.],
                [5.]])
    """
    return SparseScale.apply(x, info, info_backward, out=out)


def sparse_mul(
    x: Float[torch.Tensor, "... M1 C"],
    y: Float[torch.Tensor, "... M2 C"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size C"] | None = None,
) -> Float[torch.Tensor, "... out_size C"]:
    """Sums of scaled elementwise products of rows.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index1[t], c] * y[n, index2[t], c]

    Args:
        x: (N, M1, C), or (M1, C) shared by the batch; any strides; fp16, bf16, fp32 or fp64.
        y: (N, M2, C), or (M2, C) shared by the batch.
        info: which rows meet, on the device of x and y; `sparse_product_infos` makes all three from index lists.
        info_backward1: needed where x requires a gradient.
        info_backward2: needed where y requires a gradient.
        out_accumulated: sum over the batch; the result then has none.
        out: where to write the result, as `sparse_scale` has it; with ``out_accumulated`` it has no batch.

    Returns:
        (N, out_size, C), without N where both inputs are shared or the batch is summed, in the promoted dtype, summed
        in fp32 (fp64 for fp64); the same bits each run. Differentiable to any order in x and y.

    Raises:
        ValueError, TypeError: shapes, sizes, devices or dtypes that do not fit, or a missing backward info; out with a
            gradient asked for. Nothing is written then.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_mul, sparse_product_infos
        >>> infos = sparse_product_infos([0, 1], [0, 0], [0, 0], None, out_size=1, in1_size=2, in2_size=1)
        >>> sparse_mul(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 1.0]]), *infos)
        tensor([[40.,  6.]])
    """
    return SparseMul.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_outer(
    x: Float[torch.Tensor, "... M1 A"],
    y: Float[torch.Tensor, "... M2 B"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size A B"] | None = None,
) -> Float[torch.Tensor, "... out_size A B"]:
    """Sums of scaled outer products of rows; the weight gradient of a convolution is one.

        z[n, row(M), a, b] = sum over t in segment M of scale[t] * x[n, index1[t], a] * y[n, index2[t], b]

    x is (N, M1, A) or (M1, A), y (N, M2, B) or (M2, B), the result (N, out_size, A, B); all else as
    `sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_outer, sparse_product_infos
        >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
        >>> sparse_outer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]]), *infos).shape
        torch.Size([1, 2, 3])
    """
    return SparseOuter.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_inner(
    x: Float[torch.Tensor, "... M1 C"],
    y: Float[torch.Tensor, "... M2 C"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size"] | None = None,
) -> Float[torch.Tensor, "... out_size"]:
    """Sums of scaled inner products of rows; the logits of an attention over neighbors are one.

        z[n, row(M)] = sum over t in segment M of scale[t] * sum over c of x[n, index1[t], c] * y[n, index2[t], c]

    x is (N, M1, C) or (M1, C), y (N, M2, C) or (M2, C), the result (N, out_size); all else as `sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_inner, sparse_product_infos
        >>> infos = sparse_product_infos([0, 0], [0, 1], [0, 1], None, out_size=2, in1_size=1, in2_size=2)
        >>> sparse_inner(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]), *infos)
        tensor([3., 8.])
    """
    return SparseInner.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_vecmat(
    x: Float[torch.Tensor, "... M1 A"],
    y: Float[torch.Tensor, "... M2 A B"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size B"] | None = None,
) -> Float[torch.Tensor, "... out_size B"]:
    """Sums of scaled products of row vectors and matrices; a sparse convolution is one, over its kernel map.

        z[n, row(M), b] = sum over t in segment M of scale[t] * sum over a of x[n, index1[t], a] * y[n, index2[t], a, b]

    x is (N, M1, A) or (M1, A), y (N, M2, A, B) or (M2, A, B), the result (N, out_size, B); all else as
    `sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_product_infos, sparse_vecmat
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_vecmat(torch.ones(2, 3), torch.ones(2, 3, 4), *infos)
        tensor([[6., 6., 6., 6.]])
    """
    return SparseVecMat.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_vecsca(
    x: Float[torch.Tensor, "... M1 C"],
    y: Float[torch.Tensor, "... M2"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size C"] | None = None,
) -> Float[torch.Tensor, "... out_size C"]:
    """Sums of scaled products of row vectors and scalars: a sparse scale whose factors have a gradient.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index1[t], c] * y[n, index2[t]]

    x is (N, M1, C) or (M1, C), y (N, M2) or (M2,), the result (N, out_size, C); all else as `sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_product_infos, sparse_vecsca
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_vecsca(torch.tensor([[1.0], [5.0]]), torch.tensor([0.75, 0.25]), *infos)
        tensor([[2.]])
    """
    return SparseVecSca.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_scavec(
    x: Float[torch.Tensor, "... M1"],
    y: Float[torch.Tensor, "... M2 C"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size C"] | None = None,
) -> Float[torch.Tensor, "... out_size C"]:
    """Sums of scaled products of scalars and row vectors.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index1[t]] * y[n, index2[t], c]

    x is (N, M1) or (M1,), y (N, M2, C) or (M2, C), the result (N, out_size, C); all else as `sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_product_infos, sparse_scavec
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_scavec(torch.tensor([0.75, 0.25]), torch.tensor([[1.0], [5.0]]), *infos)
        tensor([[2.]])
    """
    return SparseScaVec.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_mat_t_vec(
    x: Float[torch.Tensor, "... M1 A B"],
    y: Float[torch.Tensor, "... M2 A"],
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: Float[torch.Tensor, "... out_size B"] | None = None,
) -> Float[torch.Tensor, "... out_size B"]:
    """Sums of scaled products of transposed matrices and vectors.

        z[n, row(M), b] = sum over t in segment M of scale[t] * sum over a of x[n, index1[t], a, b] * y[n, index2[t], a]

    x is (N, M1, A, B) or (M1, A, B), y (N, M2, A) or (M2, A), the result (N, out_size, B); all else as
    `sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_mat_t_vec, sparse_product_infos
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_mat_t_vec(torch.ones(2, 3, 4), torch.ones(2, 3), *infos)
        tensor([[6., 6., 6., 6.]])
    """
    return SparseMatTVec.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)
