"""The products as classes with ``apply``: checks before any launch, then the differentiable operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from sparseconv.products import autograd
from sparseconv.products.arguments import (
    cast,
    check_backward,
    check_info,
    check_input,
    check_out,
    check_shapes,
    check_sizes,
    out_shape,
)
from sparseconv.products.info import SparseProductInfo, SparseScaleInfo
from sparseconv.products.table import PRODUCTS, Product

if TYPE_CHECKING:
    from jaxtyping import Float


class SparseScale:
    """The differentiable sparse scale; ``SparseScale.apply`` is what `sparse_scale` calls.

    >>> from sparseconv.products import sparse_scale_infos
    >>> infos = sparse_scale_infos([0, 1], [0, 0], [1.0, 10.0], out_size=1, in_size=2)
    >>> SparseScale.apply(torch.tensor([[1.0], [2.0]]), *infos)
    tensor([[21.]])
    """

    @classmethod
    def apply(
        cls,
        input: Float[torch.Tensor, "... M_in C"],
        info_fwd: SparseScaleInfo,
        info_bwd: SparseScaleInfo | None = None,
        *,
        out: Float[torch.Tensor, "... out_size C"] | None = None,
    ) -> Float[torch.Tensor, "... out_size C"]:
        """As `sparse_scale`."""
        name = "sparse_scale"
        check_info(name, "info", info_fwd, SparseScaleInfo)
        check_info(name, "info_backward", info_bwd, SparseScaleInfo, optional=True)
        check_input(name, "x", input, info_fwd)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{name} takes x of shape (N, M, C), or (M, C) without a batch, but got shape {tuple(input.shape)}"
            )
        check_sizes(name, (input.shape[-2],), info_fwd, {"info_backward": info_bwd})
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
        input1: Float[torch.Tensor, " ..."],
        input2: Float[torch.Tensor, " ..."],
        info_fwd: SparseProductInfo,
        info_bwd1: SparseProductInfo | None = None,
        info_bwd2: SparseProductInfo | None = None,
        out_accumulated: bool = False,
        *,
        out: Float[torch.Tensor, " ..."] | None = None,
    ) -> Float[torch.Tensor, " ..."]:
        """As the function of the same name, `sparse_mul` and its six sisters."""
        row = cls.row
        name = f"sparse_{row.name}"
        check_info(name, "info", info_fwd, SparseProductInfo)
        check_info(name, "info_backward1", info_bwd1, SparseProductInfo, optional=True)
        check_info(name, "info_backward2", info_bwd2, SparseProductInfo, optional=True)
        check_input(name, "x", input1, info_fwd)
        check_input(name, "y", input2, info_fwd)
        check_shapes(row, input1, input2)
        rows = input1.shape[input1.dim() - len(row.axes1) - 1], input2.shape[input2.dim() - len(row.axes2) - 1]
        check_sizes(name, rows, info_fwd, {"info_backward1": info_bwd1, "info_backward2": info_bwd2})
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
    """The differentiable elementwise product.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseMul.apply(torch.tensor([[2.0]]), torch.tensor([[3.0]]), *infos)
    tensor([[6.]])
    """

    row = PRODUCTS["mul"]


class SparseOuter(SparseProduct):
    """The differentiable outer product.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseOuter.apply(torch.tensor([[2.0]]), torch.tensor([[3.0, 4.0]]), *infos)
    tensor([[[6., 8.]]])
    """

    row = PRODUCTS["outer"]


class SparseInner(SparseProduct):
    """The differentiable inner product.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseInner.apply(torch.tensor([[2.0, 1.0]]), torch.tensor([[3.0, 4.0]]), *infos)
    tensor([10.])
    """

    row = PRODUCTS["inner"]


class SparseVecMat(SparseProduct):
    """The differentiable product of a row vector and a matrix.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseVecMat.apply(torch.tensor([[2.0]]), torch.tensor([[[3.0, 4.0]]]), *infos)
    tensor([[6., 8.]])
    """

    row = PRODUCTS["vecmat"]


class SparseVecSca(SparseProduct):
    """The differentiable product of a vector and a scalar.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseVecSca.apply(torch.tensor([[2.0, 1.0]]), torch.tensor([3.0]), *infos)
    tensor([[6., 3.]])
    """

    row = PRODUCTS["vecsca"]


class SparseScaVec(SparseProduct):
    """The differentiable product of a scalar and a vector.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseScaVec.apply(torch.tensor([2.0]), torch.tensor([[3.0, 4.0]]), *infos)
    tensor([[6., 8.]])
    """

    row = PRODUCTS["scavec"]


class SparseMatTVec(SparseProduct):
    """The differentiable product of a transposed matrix and a vector.

    >>> from sparseconv.products import sparse_product_infos
    >>> infos = sparse_product_infos([0], [0], [0], None, out_size=1, in1_size=1, in2_size=1)
    >>> SparseMatTVec.apply(torch.tensor([[[2.0, 1.0]]]), torch.tensor([[3.0]]), *infos)
    tensor([[6., 3.]])
    """

    row = PRODUCTS["mat_t_vec"]
