"""Products of a sparse matrix, given as triples, and a dense one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.geometry.arguments import INTEGERS
from sparseconv.interop.arguments import whole
from sparseconv.kinds import check_values
from sparseconv.ops.points import PointGroups
from sparseconv.products import sparse_scale, sparse_scale_infos


def spmm(
    rows: torch.Tensor,
    cols: torch.Tensor,
    vals: torch.Tensor,
    size: Sequence[int],
    mat: torch.Tensor,
    is_sorted: bool = False,
    cuda_spmm_alg: int = 1,
) -> torch.Tensor:
    """z[rows[t]] += vals[t] * mat[cols[t]]: mat (size[1], C) -> (size[0], C).

    Differentiable in ``mat``. ``is_sorted`` and ``cuda_spmm_alg`` have no effect; the result has the same bits in every
    run.

    >>> spmm(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), (1, 2), torch.eye(2)).tolist()
    [[1.0, 2.0]]
    """
    check_values("vals", vals, "(T,)")
    high, wide = whole(size, "size", 0)
    _check_matrix(mat, wide)
    return sparse_scale(mat, *sparse_scale_infos(_rows("cols", cols), _rows("rows", rows), vals, high, wide)).to(
        mat.dtype
    )


def _check_matrix(mat: torch.Tensor, rows: int) -> None:
    check_values("mat", mat, "(size[1], C)")
    if mat.ndim != 2 or len(mat) != rows:
        raise ValueError(f"mat must be ({rows}, C), a row for each column of the sparse matrix; got {tuple(mat.shape)}")


def _rows(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Row numbers (T,) int64, of whole numbers in any dtype."""
    check_values(name, rows, "(T,) whole numbers")
    if rows.dtype not in INTEGERS and not rows.is_floating_point():
        raise TypeError(f"{name} must be whole numbers; got {rows.dtype}")
    whole = rows.long()
    if rows.is_floating_point() and not torch.equal(whole.to(rows.dtype), rows):
        raise ValueError(f"{name} must be whole numbers; some are not")
    return whole


class MinkowskiSPMMFunction:
    """`spmm` as a function."""

    @staticmethod
    def apply(
        rows: torch.Tensor,
        cols: torch.Tensor,
        vals: torch.Tensor,
        size: Sequence[int],
        mat: torch.Tensor,
        cuda_spmm_alg: int = 1,
    ) -> torch.Tensor:
        """Arguments and result of `spmm`."""
        return spmm(rows, cols, vals, size, mat)


class MinkowskiSPMMAverageFunction:
    """The mean of the rows of a matrix that go to one row."""

    @staticmethod
    def apply(
        rows: torch.Tensor, cols: torch.Tensor, size: Sequence[int], mat: torch.Tensor, cuda_spmm_alg: int = 1
    ) -> torch.Tensor:
        """z[r] = the mean of mat[cols[t]] over the t with rows[t] = r: (size[1], C) -> (size[0], C)."""
        high, wide = whole(size, "size", 0)
        _check_matrix(mat, wide)
        return PointGroups(_rows("rows", rows), high).reduce(mat[_rows("cols", cols)], "mean")
