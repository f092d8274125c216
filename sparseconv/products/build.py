"""Infos from plain index lists in any order: sorted, offset and turned to all their derivatives at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sparseconv.checks import as_tensor, check_count, check_kind
from sparseconv.products.info import AnyInfo, SparseProductInfo, SparseScaleInfo, known_right

#: an index or a scale as a tensor, an array or a list
Column: TypeAlias = torch.Tensor | npt.NDArray[np.generic] | Sequence[int] | Sequence[float]

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def sparse_scale_infos(
    index: Column, index_out: Column, scale: Column | None, out_size: int, in_size: int
) -> tuple[SparseScaleInfo, SparseScaleInfo]:
    """The info of ``z[index_out[t]] += scale[t] * x[index[t]]`` and that of its gradient.

    Args:
        index: (T,) integer, rows of the input, in any order, repeated or not.
        index_out: (T,) integer, rows of the output, in any order; any row may be absent.
        scale: (T,) floating, or None for 1.
        out_size: rows of the output.
        in_size: rows of the input.

    Returns:
        (forward, backward), on the device of the given tensors (the CPU for arrays and lists).

    Raises:
        ValueError: an index outside its size, or columns of unequal lengths.
        TypeError: an index that is not integer, or a scale that is not a number.

    Example::

        >>> from sparseconv.products import sparse_scale_infos
        >>> forward, backward = sparse_scale_infos([2, 0], [1, 1], [0.5, 0.5], out_size=3, in_size=3)
        >>> forward.seg_out.tolist(), backward.seg_out.tolist()
        ([0, 0, 2, 2], [0, 1, 1, 2])
    """
    forward, backward = _turned(SparseScaleInfo, scale, 2, index=(index, in_size), index_out=(index_out, out_size))
    return forward, backward


def sparse_scale_info(
    index: Column, index_out: Column, scale: Column | None, out_size: int, in_size: int
) -> SparseScaleInfo:
    """The forward info of `sparse_scale_infos` alone, for calls that need no gradient.

    >>> sparse_scale_info([2, 0], [0, 1], None, 2, 3).out_size
    2
    """
    return _turned(SparseScaleInfo, scale, 1, index=(index, in_size), index_out=(index_out, out_size))[0]


def sparse_product_infos(
    index1: Column,
    index2: Column,
    index_out: Column,
    scale: Column | None,
    out_size: int,
    in1_size: int,
    in2_size: int,
) -> tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]:
    """The info of ``z[index_out[t]] += scale[t] * x[index1[t]] o y[index2[t]]`` and those of its two gradients.

    The three turn: as (forward, backward1, backward2) serves the product, (backward1, backward2, forward) serves the
    gradient to x and (backward2, forward, backward1) the gradient to y, and so on to any order.

    Args:
        index1: (T,) integer, rows of the first input, in any order, repeated or not.
        index2: (T,) integer, rows of the second input.
        index_out: (T,) integer, rows of the output; any row may be absent.
        scale: (T,) floating, or None for 1.
        out_size: rows of the output.
        in1_size: rows of the first input.
        in2_size: rows of the second input.

    Returns:
        (forward, backward1, backward2), on the device of the given tensors (the CPU for arrays and lists).

    Raises:
        ValueError: an index outside its size, or columns of unequal lengths.
        TypeError: an index that is not integer, or a scale that is not a number.

    Example::

        >>> import torch
        >>> from sparseconv.products import sparse_mul, sparse_product_infos
        >>> infos = sparse_product_infos([0, 1], [1, 0], [0, 0], [1.0, -1.0], out_size=1, in1_size=2, in2_size=2)
        >>> sparse_mul(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), *infos)  # 1 * 4 - 2 * 3
        tensor([[-2.]])
    """
    named = {"index1": (index1, in1_size), "index2": (index2, in2_size), "index_out": (index_out, out_size)}
    forward, backward1, backward2 = _turned(SparseProductInfo, scale, 3, **named)
    return forward, backward1, backward2


def sparse_product_info(
    index1: Column,
    index2: Column,
    index_out: Column,
    scale: Column | None,
    out_size: int,
    in1_size: int,
    in2_size: int,
) -> SparseProductInfo:
    """The forward info of `sparse_product_infos` alone, for calls that need no gradient.

    >>> sparse_product_info([0], [0], [1], None, 2, 1, 1).out_size
    2
    """
    named = {"index1": (index1, in1_size), "index2": (index2, in2_size), "index_out": (index_out, out_size)}
    return _turned(SparseProductInfo, scale, 1, **named)[0]


def backward_infos(info: SparseScaleInfo | SparseProductInfo, *in_sizes: int) -> tuple[Any, ...]:
    """The infos of the gradients of an info that was made by hand: (backward,) of a scale, both of a product.

    A call whose inputs require gradients takes them beside the info. Building them sorts the terms once for each, so
    do it once and keep them. They are those of the indices as they are now.

    Args:
        info: the forward info.
        in_sizes: rows of each input, x and for a product y; may be left out where the info knows them.

    Raises:
        ValueError: sizes that are not known, not as many as there are inputs, or too small for the indices.

    Example::

        >>> import torch
        >>> from sparseconv.products import SparseScaleInfo, backward_infos, sparse_scale
        >>> info = SparseScaleInfo(torch.tensor([1.0, 10.0]), torch.tensor([0, 2]), torch.tensor([0, 2]), 1)
        >>> x = torch.ones(3, 1, requires_grad=True)
        >>> sparse_scale(x, info, *backward_infos(info, len(x))).sum().backward()
        >>> x.grad.flatten().tolist()
        [1.0, 0.0, 10.0]
    """
    check_kind("info", info, (SparseScaleInfo, SparseProductInfo), "pass the info of the forward")
    inputs = tuple(info._inputs)
    sizes = in_sizes or info.in_sizes
    if len(sizes) != len(inputs) or None in sizes:
        raise ValueError(
            f"backward_infos needs the rows of each input, {len(inputs)} of a {type(info).__name__}; got {sizes}"
        )
    terms, device = info.terms, info.device
    positions = torch.arange(terms.num_positions(sizes[0], sizes[-1]), device=device)  # type: ignore[arg-type]
    segments = positions
    if terms.seg_out is not None:
        counts = terms.seg_out.long().diff()
        segments = torch.arange(len(counts), device=device).repeat_interleave(counts)
        positions = terms.seg_out[0] + torch.arange(len(segments), device=device)
    at = positions if terms.gather_index is None else terms.gather_index[positions]
    rows = [at if index is None else index[at] for index in (terms.index1, terms.index2)]
    named: dict[str, Any] = dict(zip(inputs, zip(rows, sizes)))
    named["index_out"] = segments if terms.index_out is None else terms.index_out[segments], terms.out_size
    scale = None if terms.scale is None else terms.scale[at]
    return tuple(_turned(type(info), scale, 1 + len(inputs), **named)[1:])


def _turned(kind: type[AnyInfo], scale: Column | None, turns: int, **named: tuple[Column, int]) -> list[AnyInfo]:
    """The info of these columns, whose last is the output's, and those of as many ``turns`` less one.

    Each turn moves the first column behind the last, and the next info writes the rows that the first input had.
    """
    columns, weights = _columns(named, scale)
    sizes = [size for _, size in named.values()]
    unsorted = (None,) * (len(columns) - 1)  # neither kind has an index_out, nor a product a gather_index
    infos = []
    for turn in range(turns):
        *rows_in, rows_out = columns[turn:] + columns[:turn]
        *in_sizes, out_size = sizes[turn:] + sizes[:turn]
        order, seg_out = _by_output(rows_out, out_size)
        factors = None if weights is None else weights[order]
        inputs = (rows[order] for rows in rows_in)
        infos.append(known_right(kind, factors, *inputs, seg_out, *unsorted, out_size, *in_sizes))
    return infos


def _columns(
    named: dict[str, tuple[Column, int]], scale: Column | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Checked int32 columns (int64 where a size asks for it) and the scale, on one device."""
    given = [value for value, _ in named.values()] + [scale]
    device = next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))
    columns = []
    for name, (value, size) in named.items():
        check_count(f"the size of {name}", size)
        column = as_tensor(name, value, device)
        if column.numel() == 0 or column.dtype in _UNSIGNED:
            column = column.long()  # an empty list has no integers to show, and torch no least of unsigned ones
        if column.dtype.is_floating_point or column.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise TypeError(f"{name} must hold integers, but its dtype is {column.dtype}")
        columns.append(column)
    weights = None if scale is None else as_tensor("scale", scale, device)
    if weights is not None and not weights.dtype.is_floating_point:
        if weights.dtype.is_complex or weights.dtype == torch.bool:
            raise TypeError(f"scale must hold real numbers, but its dtype is {weights.dtype}")
        weights = weights.to(torch.get_default_dtype())
    shapes = {name: tuple(column.shape) for name, column in zip(named, columns)}
    if weights is not None:
        shapes["scale"] = tuple(weights.shape)
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError(f"every column must have one entry for each term, but the shapes are {shapes}")
    _check_ranges(named, columns)
    narrow = all(size < 2**31 for _, size in named.values())
    return [column.to(torch.int32 if narrow else torch.int64) for column in columns], weights


def _check_ranges(named: dict[str, tuple[Column, int]], columns: list[torch.Tensor]) -> None:
    if columns[0].numel() == 0:
        return
    # one transfer for all columns: the only time that a builder waits for a device
    extremes = torch.stack([torch.stack(torch.aminmax(column)).long() for column in columns]).tolist()
    for (name, (_, size)), column, (low, high) in zip(named.items(), columns, extremes):
        if low < 0 or high >= size:
            position = int(((column < 0) | (column >= size)).nonzero()[0])
            raise ValueError(
                f"{name} must lie within 0 .. {size - 1}, its size being {size}, "
                f"but entry {position} is {int(column[position])}"
            )


def _by_output(rows_out: torch.Tensor, out_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stable order that sorts terms by output row, and where each row's terms begin: (T,), (out_size + 1,) or None.

    None where every row has one term: then there is nothing to sum.
    """
    ordered, order = torch.sort(rows_out, stable=True)
    bounds = torch.arange(out_size + 1, device=rows_out.device, dtype=ordered.dtype)
    if rows_out.shape[0] == out_size and torch.equal(ordered, bounds[:-1]):
        return order, None
    return order, torch.searchsorted(ordered, bounds)
