"""The public operations: checks before any launch, then the differentiable operation."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparseconv.products import autograd
from sparseconv.products.info import SparseProductInfo, SparseScaleInfo
from sparseconv.products.table import PRODUCTS, Product

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SparseScale:
    """The differentiable sparse scale; ``SparseScale.apply`` is what :func:`sparse_scale` calls."""

    @classmethod
    def apply(
        cls, input: torch.Tensor, info_fwd: SparseScaleInfo, info_bwd: SparseScaleInfo | None = None
    ) -> torch.Tensor:
        """As :func:`sparse_scale`."""
        name = "sparse_scale"
        _check_info(name, "info", info_fwd, SparseScaleInfo)
        _check_info(name, "info_backward", info_bwd, SparseScaleInfo, optional=True)
        _check_tensor(name, "x", input, info_fwd)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{name} takes x of shape (N, M, C), or (M, C) without a batch, but got shape {tuple(input.shape)}"
            )
        needed = info_fwd.in_size
        if needed is None and info_bwd is not None:
            needed = info_bwd.out_size
        if needed is not None:
            _check_rows(name, "x", input.shape[-2], needed, exact=True)
        elif not torch.compiler.is_compiling():
            _check_rows(name, "x", input.shape[-2], info_fwd.least_in_size, exact=False)
        if info_bwd is None:
            _check_backward(name, "x", input, "info_backward", "sparse_scale_infos")
        return autograd.scale(_cast(input), (info_fwd.terms, None if info_bwd is None else info_bwd.terms))


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
    ) -> torch.Tensor:
        """As the function of the same name, :func:`sparse_mul` and its six sisters."""
        row = cls.row
        name = f"sparse_{row.name}"
        _check_info(name, "info", info_fwd, SparseProductInfo)
        _check_info(name, "info_backward1", info_bwd1, SparseProductInfo, optional=True)
        _check_info(name, "info_backward2", info_bwd2, SparseProductInfo, optional=True)
        _check_tensor(name, "x", input1, info_fwd)
        _check_tensor(name, "y", input2, info_fwd)
        _check_shapes(row, input1, input2)
        _check_sizes(row, input1, input2, info_fwd, info_bwd1, info_bwd2)
        if info_bwd1 is None:
            _check_backward(name, "x", input1, "info_backward1", "sparse_product_infos")
        if info_bwd2 is None:
            _check_backward(name, "y", input2, "info_backward2", "sparse_product_infos")
        infos = (
            info_fwd.terms,
            None if info_bwd1 is None else info_bwd1.terms,
            None if info_bwd2 is None else info_bwd2.terms,
        )
        return autograd.product(row, _cast(input1), _cast(input2), infos, out_accumulated)


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


def sparse_scale(x: torch.Tensor, info: SparseScaleInfo, info_backward: SparseScaleInfo | None = None) -> torch.Tensor:
    """Sums scaled rows: a product with a sparse matrix along the rows of x, for every batch item and channel.

        z[n, row(M), c] = sum over t in segment M of scale[t] * x[n, index[t], c]

    Args:
        x: (N, M_in, C), or (M_in, C) without a batch; any strides; fp16, bf16, fp32 or fp64.
        info: what is summed where, on the device of x; :func:`sparse_scale_infos` makes it from index lists.
        info_backward: the transpose, needed where x requires a gradient.

    Returns:
        (N, out_size, C), or (out_size, C), in the dtype of x, summed in fp32 (fp64 for fp64); the same bits each run.
        Differentiable to any order. ``scale`` gets no gradient: where it should (weights of an interpolation at
        positions that are learnt), give it as the second input of :func:`sparse_vecsca`.

    Raises:
        ValueError, TypeError: shapes, sizes, devices or dtypes that do not fit, or a missing info_backward.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_scale, sparse_scale_infos
        >>> infos = sparse_scale_infos([0, 1, 2], index_out=[0, 0, 1], scale=[0.5, 0.5, 1.0], out_size=2, in_size=3)
        >>> sparse_scale(torch.tensor([[1.0], [3.0], [5.0]]), *infos)
        tensor([[2.],
                [5.]])
    """
    return SparseScale.apply(x, info, info_backward)


def sparse_mul(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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

    Returns:
        (N, out_size, C), without N where both inputs are shared or the batch is summed, in the promoted dtype, summed
        in fp32 (fp64 for fp64); the same bits each run. Differentiable to any order in x and y.

    Raises:
        ValueError, TypeError: shapes, sizes, devices or dtypes that do not fit, or a missing backward info.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_mul, sparse_product_infos
        >>> infos = sparse_product_infos([0, 1], [0, 0], [0, 0], None, out_size=1, in1_size=2, in2_size=1)
        >>> sparse_mul(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 1.0]]), *infos)
        tensor([[40.,  6.]])
    """
    return SparseMul.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def sparse_outer(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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
    return SparseOuter.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def sparse_inner(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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
    return SparseInner.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def sparse_vecmat(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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
    return SparseVecMat.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def sparse_vecsca(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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
    return SparseVecSca.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def sparse_scavec(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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
    return SparseScaVec.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def sparse_mat_t_vec(
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None = None,
    info_backward2: SparseProductInfo | None = None,
    out_accumulated: bool = False,
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
    return SparseMatTVec.apply(x, y, info, info_backward1, info_backward2, out_accumulated)


def _cast(x: torch.Tensor) -> torch.Tensor:
    """Under autocast the inputs take its dtype, as those of a convolution do; sums stay in fp32."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _check_info(name: str, argument: str, info: object, kind: type, optional: bool = False) -> None:
    if not isinstance(info, kind) and not (optional and info is None):
        raise TypeError(f"{name} takes {argument} as a {kind.__name__}, but got {type(info).__name__}")


def _check_tensor(name: str, argument: str, x: object, info: SparseScaleInfo | SparseProductInfo) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes {argument} as a tensor, but got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} takes {argument} in fp16, bf16, fp32 or fp64, but its dtype is {x.dtype}")
    device = info.device
    if device is not None and x.device != device:
        raise ValueError(
            f"{name} needs {argument} and info on one device, but {argument} is on {x.device} and info on {device}; "
            f"move one of them, info.to({str(x.device)!r}) for the info"
        )


def _check_rows(name: str, argument: str, rows: int, needed: int, exact: bool) -> None:
    if (rows != needed) if exact else (rows < needed):
        least = "" if exact else "at least "
        raise ValueError(f"{name} with this info needs {least}{needed} rows in {argument}, but {argument} has {rows}")


def _check_backward(name: str, argument: str, x: torch.Tensor, missing: str, builder: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} needs {missing} because {argument} requires a gradient, but it was not given; "
            f"{builder} makes the forward and backward infos together"
        )


def _shape_text(axes: str, rows: str) -> str:
    inner = ", ".join([rows, *axes.upper()])
    return f"(N, {inner}) or shared ({inner}{',' if not axes else ''})"


def _check_shapes(row: Product, x: torch.Tensor, y: torch.Tensor) -> None:
    name = f"sparse_{row.name}"
    if x.device != y.device:
        raise ValueError(f"{name} needs x and y on one device, but they are on {x.device} and {y.device}")
    for argument, tensor, axes, rows in (("x", x, row.axes1, "M1"), ("y", y, row.axes2, "M2")):
        if tensor.dim() - len(axes) not in (1, 2):
            raise ValueError(
                f"{name} takes {argument} of shape {_shape_text(axes, rows)}, "
                f"but got shape {tuple(tensor.shape)} of rank {tensor.dim()}"
            )
    if x.dim() == len(row.axes1) + 2 and y.dim() == len(row.axes2) + 2 and x.shape[0] != y.shape[0]:
        raise ValueError(f"{name} needs one batch size N, but x has {x.shape[0]} items and y {y.shape[0]}")
    sizes2 = dict(zip(row.axes2, y.shape[y.dim() - len(row.axes2) :]))
    for axis, size in zip(row.axes1, x.shape[x.dim() - len(row.axes1) :]):
        if axis in sizes2 and sizes2[axis] != size:
            raise ValueError(
                f"{name} takes x {_shape_text(row.axes1, 'M1')} and y {_shape_text(row.axes2, 'M2')} with the same "
                f"{axis.upper()}, but got shapes {tuple(x.shape)} and {tuple(y.shape)}"
            )


def _check_sizes(
    row: Product,
    x: torch.Tensor,
    y: torch.Tensor,
    info: SparseProductInfo,
    info_backward1: SparseProductInfo | None,
    info_backward2: SparseProductInfo | None,
) -> None:
    name = f"sparse_{row.name}"
    rows1, rows2 = x.shape[x.dim() - len(row.axes1) - 1], y.shape[y.dim() - len(row.axes2) - 1]
    backward = (info_backward1, info_backward2)
    for i, (argument, rows) in enumerate((("x", rows1), ("y", rows2))):
        known = info.in1_size if i == 0 else info.in2_size
        other = backward[i]
        if known is None and other is not None:
            known = other.out_size
        if known is not None:
            _check_rows(name, argument, rows, known, exact=True)
        elif not torch.compiler.is_compiling():
            _check_rows(name, argument, rows, info.least_in_sizes[i], exact=False)
