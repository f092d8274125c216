"""The public operations: checks before any launch, then the differentiable operation."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparseconv.products import autograd
from sparseconv.products.arguments import (
    cast,
    check_backward,
    check_info,
    check_input,
    check_out,
    check_scale_sizes,
    check_shapes,
    check_sizes,
    out_shape,
)
from sparseconv.products.info import SparseProductInfo, SparseScaleInfo
from sparseconv.products.table import PRODUCTS, Product


class SparseScale:
    """The differentiable sparse scale; ``SparseScale.apply`` is what :func:`sparse_scale` calls."""

    @classmethod
    def apply(
        cls,
        input: torch.Tensor,
        info_fwd: SparseScaleInfo,
        info_bwd: SparseScaleInfo | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :func:`sparse_scale`."""
        name = "sparse_scale"
        check_info(name, "info", info_fwd, SparseScaleInfo)
        check_info(name, "info_backward", info_bwd, SparseScaleInfo, optional=True)
        check_input(name, "x", input, info_fwd)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{name} takes x of shape (N, M, C), or (M, C) without a batch, but got shape {tuple(input.shape)}"
            )
        check_scale_sizes(input, info_fwd, info_bwd)
        if info_bwd is None and out is None:
            check_backward(name, "x", input, "info_backward", "sparse_scale_infos")
        infos = info_fwd.terms, None if info_bwd is None else info_bwd.terms
        x = cast(input)
        if out is not None:
            check_out(name, out, (*x.shape[:-2], info_fwd.num_rows, x.shape[-1]), x.dtype, (x,))
        return autograd.scale(x, infos, out)


class SparseProduct:
    """What the seven differentiable products share; each has its row of the table."""

    row: ClassVar[Product]

    @classmethod
    def apply(
        cls,
        input1: torch.Tensor,
        input2: torch.Tensor,
        info_fwd: SparseProductInfo,
        info_bwd1: SparseProductInfo | None = None,
        info_bwd2: SparseProductInfo | None = None,
        out_accumulated: bool = False,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the function of the same name, :func:`sparse_mul` and its six sisters."""
        row = cls.row
        name = f"sparse_{row.name}"
        check_info(name, "info", info_fwd, SparseProductInfo)
        check_info(name, "info_backward1", info_bwd1, SparseProductInfo, optional=True)
        check_info(name, "info_backward2", info_bwd2, SparseProductInfo, optional=True)
        check_input(name, "x", input1, info_fwd)
        check_input(name, "y", input2, info_fwd)
        check_shapes(row, input1, input2)
        check_sizes(row, input1, input2, info_fwd, info_bwd1, info_bwd2)
        if info_bwd1 is None and out is None:
            check_backward(name, "x", input1, "info_backward1", "sparse_product_infos")
        if info_bwd2 is None and out is None:
            check_backward(name, "y", input2, "info_backward2", "sparse_product_infos")
        infos = (
            info_fwd.terms,
            None if info_bwd1 is None else info_bwd1.terms,
            None if info_bwd2 is None else info_bwd2.terms,
        )
        x, y = cast(input1), cast(input2)
        if out is not None:
            shape = out_shape(row, x, y, info_fwd.num_rows, out_accumulated)
            check_out(name, out, shape, torch.promote_types(x.dtype, y.dtype), (x, y))
        return autograd.product(row, x, y, infos, out_accumulated, out)


class SparseMul(SparseProduct):
    """The differentiable elementwise product."""

    row = PRODUCTS["mul"]


class SparseOuter(SparseProduct):
    """The differentiable outer product."""

    row = PRODUCTS["outer"]


class SparseInner(SparseProduct):
    """The differentiable inner product."""

    row = PRODUCTS["inner"]


class SparseVecMat(SparseProduct):
    """The differentiable product of a row vector and a matrix."""

    row = PRODUCTS["vecmat"]


class SparseVecSca(SparseProduct):
    """The differentiable product of a vector and a scalar."""

    row = PRODUCTS["vecsca"]


class SparseScaVec(SparseProduct):
    """The differentiable product of a scalar and a vector."""

    row = PRODUCTS["scavec"]


class SparseMatTVec(SparseProduct):
    """The differentiable product of a transposed matrix and a vector."""

    row = PRODUCTS["mat_t_vec"]


def sparse_scale(
    x: torch.Tensor,
    info: SparseScaleInfo,
    info_backward: SparseScaleInfo | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums scaled rows: a product with a sparse matrix along the rows of x, for every batch item and channel.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index[t], c]

    Args:
        x: (N, M_in, C), or (M_in, C) without a batch; any strides; fp16, bf16, fp32 or fp64.
        info: what is summed where, on the device of x; :func:`sparse_scale_infos` makes it from index lists.
        info_backward: the transpose, needed where x requires a gradient.
        out: where to write the result, of its shape, dtype and device, with any strides that overlap nowhere. It is
            overwritten whole, rows that ``index_out`` does not list by zeros, and returned. Not differentiable.

    Returns:
        (N, out_size, C), or (out_size, C), in the dtype of x, summed in fp32 (fp64 for fp64); the same bits each run.
        Differentiable to any order. ``scale`` gets no gradient: where it should (weights of an interpolation at
        positions that are learnt), give it as the second input of :func:`sparse_vecsca`.

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
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled elementwise products of rows.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index1[t], c] * y[n, index2[t], c]

    Args:
        x: (N, M1, C), or (M1, C) shared by the batch; any strides; fp16, bf16, fp32 or fp64.
        y: (N, M2, C), or (M2, C) shared by the batch.
        info: which rows meet, on the device of x and y; :func:`sparse_product_infos` makes all three from index lists.
        info_backward1: needed where x requires a gradient.
        info_backward2: needed where y requires a gradient.
        out_accumulated: sum over the batch; the result then has none.
        out: where to write the result, as :func:`sparse_scale` has it; with ``out_accumulated`` it has no batch.

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
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled outer products of rows; the weight gradient of a convolution is one.

        z[n, row(M), a, b] = sum over t in segment M of scale[t] * x[n, index1[t], a] * y[n, index2[t], b]

    x is (N, M1, A) or (M1, A), y (N, M2, B) or (M2, B), the result (N, out_size, A, B); all else as
    :func:`sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_outer, sparse_product_infos
        >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
        >>> sparse_outer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]]), *infos).shape
        torch.Size([1, 2, 3])
    """
    return SparseOuter.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_inner(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled inner products of rows; the logits of an attention over neighbours are one.

        z[n, row(M)] = sum over t in segment M of scale[t] * sum over c of x[n, index1[t], c] * y[n, index2[t], c]

    x is (N, M1, C) or (M1, C), y (N, M2, C) or (M2, C), the result (N, out_size); all else as :func:`sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_inner, sparse_product_infos
        >>> infos = sparse_product_infos([0, 0], [0, 1], [0, 1], None, out_size=2, in1_size=1, in2_size=2)
        >>> sparse_inner(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]), *infos)
        tensor([3., 8.])
    """
    return SparseInner.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_vecmat(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled products of row vectors and matrices; a sparse convolution is one, over its kernel map.

        z[n, row(M), b] = sum over t in segment M of scale[t] * sum over a of x[n, index1[t], a] * y[n, index2[t], a, b]

    x is (N, M1, A) or (M1, A), y (N, M2, A, B) or (M2, A, B), the result (N, out_size, B); all else as
    :func:`sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_product_infos, sparse_vecmat
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_vecmat(torch.ones(2, 3), torch.ones(2, 3, 4), *infos)
        tensor([[6., 6., 6., 6.]])
    """
    return SparseVecMat.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_vecsca(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled products of row vectors and scalars: a sparse scale whose factors have a gradient.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index1[t], c] * y[n, index2[t]]

    x is (N, M1, C) or (M1, C), y (N, M2) or (M2,), the result (N, out_size, C); all else as :func:`sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_product_infos, sparse_vecsca
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_vecsca(torch.tensor([[1.0], [5.0]]), torch.tensor([0.75, 0.25]), *infos)
        tensor([[2.]])
    """
    return SparseVecSca.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_scavec(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled products of scalars and row vectors.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index1[t]] * y[n, index2[t], c]

    x is (N, M1) or (M1,), y (N, M2, C) or (M2, C), the result (N, out_size, C); all else as :func:`sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_product_infos, sparse_scavec
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_scavec(torch.tensor([0.75, 0.25]), torch.tensor([[1.0], [5.0]]), *infos)
        tensor([[2.]])
    """
    return SparseScaVec.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)


def sparse_mat_t_vec(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of scaled products of transposed matrices and vectors.

        z[n, row(M), b] = sum over t in segment M of scale[t] * sum over a of x[n, index1[t], a, b] * y[n, index2[t], a]

    x is (N, M1, A, B) or (M1, A, B), y (N, M2, A) or (M2, A), the result (N, out_size, B); all else as
    :func:`sparse_mul`.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_mat_t_vec, sparse_product_infos
        >>> infos = sparse_product_infos([0, 1], [0, 1], [0, 0], None, out_size=1, in1_size=2, in2_size=2)
        >>> sparse_mat_t_vec(torch.ones(2, 3, 4), torch.ones(2, 3), *infos)
        tensor([[6., 6., 6., 6.]])
    """
    return SparseMatTVec.apply(x, y, info, info_backward1, info_backward2, out_accumulated, out=out)
