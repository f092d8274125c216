"""The frozen structures that say which rows a sparse scale or product reads, weighs, sums and writes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import torch

from sparseconv.products.terms import Terms, make_terms

_INDEX_DTYPES = (torch.int32, torch.int64)
_AnyInfo = TypeVar("_AnyInfo", "SparseScaleInfo", "SparseProductInfo")


@dataclass(frozen=True, eq=False)
class SparseScaleInfo:
    """Which rows a sparse scale sums, and with which factors.

        z[n, row(M), c] = sum over t in seg_out[M] .. seg_out[M+1]-1 of scale[t] * x[n, index[t], c]

    Every field may be None, with the meaning given in its comment. ``in_size`` is what a builder knows beyond the
    formula; it lets a call check its input without looking at the indices.

    Example::

        >>> import torch
        >>> from sparseconv.products import SparseScaleInfo, sparse_scale
        >>> scale, index, seg_out = torch.tensor([1.0, 10.0, 1.0]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
        >>> info = SparseScaleInfo(scale, index, seg_out, None, 2)
        >>> sparse_scale(torch.tensor([[1.0], [2.0]]), info)
        tensor([[21.],
                [ 2.]])
    """

    scale: torch.Tensor | None  # (T,) floating; None: 1
    index: torch.Tensor | None  # (T,) int32 or int64, rows of the input; None: t
    seg_out: torch.Tensor | None  # (S + 1,) int32 or int64, ascending; None: no sum, S = T
    index_out: torch.Tensor | None  # (S,) rows of the output, no two alike, others stay zero; None: row M
    out_size: int | None  # rows of the output; None: S
    in_size: int | None = None  # rows of the input, where known
    terms: Terms = field(init=False, repr=False)
    device: torch.device | None = field(init=False, repr=False)  # of the tensors; None where every field is None

    def __post_init__(self) -> None:
        terms = _same_length(self, ("scale", "index"))
        _settle_out_size(self, terms if terms is not None else self.in_size)
        # a plain attribute, made now: torch.compile reads it as a constant, where it cannot trace a cached property
        columns = (self.scale, self.index, None, self.seg_out, None, self.index_out)
        object.__setattr__(self, "terms", make_terms(*columns, self.num_rows))
        object.__setattr__(self, "device", _device(self))

    @property
    def num_rows(self) -> int:
        """The rows of the output, known where ``out_size`` was None too."""
        return 0 if self.out_size is None else self.out_size

    @property
    def num_segments(self) -> int:
        """S, the number of output rows that are written."""
        return _num_segments(self)

    @cached_property
    def least_in_size(self) -> int:
        """The fewest input rows that the indices fit in (looks at them once)."""
        return _least_size(self, self.index, self.in_size, "index")

    def to(self, device: torch.device | str) -> SparseScaleInfo:
        """The same info on another device."""
        return _moved(self, torch.device(device))

    def validate(self, in_size: int | None = None) -> SparseScaleInfo:
        """Looks at every value and returns the info itself; raises ValueError that names the first bad entry."""
        _check_segments(self, _terms(self, self.scale, self.index))
        in_size = self.in_size if in_size is None else in_size
        if in_size is not None:
            _check_range("index", self.index, in_size, "rows of the input (in_size)")
        return self


@dataclass(frozen=True, eq=False)
class SparseProductInfo:
    """Which pairs of rows a sparse product multiplies, with which factors, and where their sums go.

        z[n, row(M)] = sum over k in seg_out[M] .. seg_out[M+1]-1, with t = gather_index[k], of
                       scale[t] * x[n, index1[t]] o y[n, index2[t]]

    Every field may be None, with the meaning in its comment. ``in1_size`` and ``in2_size`` are what a builder knows
    beyond the formula; they let a call check its inputs without looking at the indices.

    Example::

        >>> import torch
        >>> from sparseconv.products import SparseProductInfo, sparse_mul
        >>> index1, index2, seg_out = torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([0, 2])
        >>> info = SparseProductInfo(None, index1, index2, seg_out, None, None, 1)
        >>> sparse_mul(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), info)
        tensor([[10.]])
    """

    scale: torch.Tensor | None  # (T,) floating; None: 1
    index1: torch.Tensor | None  # (T,) int32 or int64, rows of the first input; None: t
    index2: torch.Tensor | None  # (T,) int32 or int64, rows of the second input; None: t
    seg_out: torch.Tensor | None  # (S + 1,) int32 or int64, ascending; None: no sum, one segment for each k
    gather_index: torch.Tensor | None  # (Q,) int32 or int64, the t of position k; None: k
    index_out: torch.Tensor | None  # (S,) rows of the output, no two alike, others stay zero; None: row M
    out_size: int | None  # rows of the output; None: S
    in1_size: int | None = None  # rows of the first input, where known
    in2_size: int | None = None  # rows of the second input, where known
    terms: Terms = field(init=False, repr=False)
    device: torch.device | None = field(init=False, repr=False)  # of the tensors; None where every field is None

    def __post_init__(self) -> None:
        terms = _same_length(self, ("scale", "index1", "index2"))
        if self.gather_index is not None:
            terms = self.gather_index.shape[0]
        _settle_out_size(self, terms if terms is not None else self.in1_size)
        columns = (self.scale, self.index1, self.index2, self.seg_out, self.gather_index, self.index_out)
        # a plain attribute, made now: torch.compile reads it as a constant, where it cannot trace a cached property
        object.__setattr__(self, "terms", make_terms(*columns, self.num_rows))
        object.__setattr__(self, "device", _device(self))

    @property
    def num_rows(self) -> int:
        """The rows of the output, known where ``out_size`` was None too."""
        return 0 if self.out_size is None else self.out_size

    @property
    def num_segments(self) -> int:
        """S, the number of output rows that are written."""
        return _num_segments(self)

    @cached_property
    def least_in_sizes(self) -> tuple[int, int]:
        """The fewest rows of both inputs that the indices fit in (looks at them once)."""
        return (
            _least_size(self, self.index1, self.in1_size, "index1"),
            _least_size(self, self.index2, self.in2_size, "index2"),
        )

    def to(self, device: torch.device | str) -> SparseProductInfo:
        """The same info on another device."""
        return _moved(self, torch.device(device))

    def validate(self, in1_size: int | None = None, in2_size: int | None = None) -> SparseProductInfo:
        """Looks at every value and returns the info itself; raises ValueError that names the first bad entry."""
        terms = _terms(self, self.scale, self.index1, self.index2)
        if self.gather_index is not None and terms is not None:
            _check_range("gather_index", self.gather_index, terms, "terms")
        _check_segments(self, terms if self.gather_index is None else self.gather_index.shape[0])
        for name, index, size in (("1", self.index1, in1_size), ("2", self.index2, in2_size)):
            size = getattr(self, f"in{name}_size") if size is None else size
            if size is not None:
                _check_range(f"index{name}", index, size, f"rows of the input (in{name}_size)")
        return self


def _tensors(info: SparseScaleInfo | SparseProductInfo) -> dict[str, torch.Tensor]:
    named = {column.name: getattr(info, column.name) for column in fields(info) if column.init}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _device(info: SparseScaleInfo | SparseProductInfo) -> torch.device | None:
    return next((tensor.device for tensor in _tensors(info).values()), None)


def _moved(info: _AnyInfo, device: torch.device) -> _AnyInfo:
    values: dict[str, Any] = {column.name: getattr(info, column.name) for column in fields(info) if column.init}
    values = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    moved: _AnyInfo = type(info)(**values)
    for name in ("least_in_size", "least_in_sizes"):
        if name in info.__dict__:
            moved.__dict__[name] = info.__dict__[name]
    return moved


def _terms(info: SparseScaleInfo | SparseProductInfo, *columns: torch.Tensor | None) -> int | None:
    return next((column.shape[0] for column in columns if column is not None), None)


def _num_segments(info: SparseScaleInfo | SparseProductInfo) -> int:
    if info.seg_out is not None:
        return info.seg_out.shape[0] - 1
    if info.index_out is not None:
        return info.index_out.shape[0]
    assert info.out_size is not None  # settled when the info was made
    return info.out_size


def _same_length(info: SparseScaleInfo | SparseProductInfo, columns: tuple[str, ...]) -> int | None:
    """Ranks, dtypes, devices and lengths, none of which needs a look at a value; returns the number of terms."""
    name = type(info).__name__
    device = _device(info)
    for column, tensor in _tensors(info).items():
        if tensor.dim() != 1:
            raise ValueError(f"{name}.{column} must have one dimension, but its shape is {tuple(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(
                f"{name} must live on one device, but {column} is on {tensor.device} and others on {device}"
            )
        if column == "scale" and not tensor.dtype.is_floating_point:
            raise TypeError(f"{name}.scale must be floating, but its dtype is {tensor.dtype}")
        if tensor.requires_grad:
            raise ValueError(
                f"{name}.scale is a constant and gets no gradient, but it requires one: give it as the second input of "
                f"sparse_vecsca (index2 None), or detach it"
            )
        if column != "scale" and tensor.dtype not in _INDEX_DTYPES:
            raise TypeError(f"{name}.{column} must be int32 or int64, but its dtype is {tensor.dtype}")
    lengths = {column: getattr(info, column).shape[0] for column in columns if getattr(info, column) is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name} needs one entry for each term in every column, but the lengths are {lengths}")
    return next(iter(lengths.values()), None)


def _settle_out_size(info: SparseScaleInfo | SparseProductInfo, terms: int | None) -> None:
    name = type(info).__name__
    if info.seg_out is not None and info.seg_out.shape[0] == 0:
        raise ValueError(f"{name}.seg_out must have S + 1 entries, at least one, but it is empty")
    segments = info.seg_out.shape[0] - 1 if info.seg_out is not None else terms
    if info.index_out is not None:
        if segments is not None and info.index_out.shape[0] != segments:
            raise ValueError(
                f"{name}.index_out names the row of each segment: {segments} segments need as many entries, "
                f"but it has {info.index_out.shape[0]}"
            )
        if info.out_size is None:
            raise ValueError(f"{name}.out_size must be given with index_out, which may leave rows at the end empty")
        return
    if info.out_size is None:
        if segments is None:
            raise ValueError(f"{name}.out_size must be given where no field says how many rows the output has")
        object.__setattr__(info, "out_size", segments)
    elif segments is not None and info.out_size != segments:
        raise ValueError(
            f"{name} without index_out writes segment M to row M, so out_size must be the number of segments: "
            f"got out_size {info.out_size} and {segments} segments; give index_out, or repeat offsets in seg_out"
        )


def _check_segments(info: SparseScaleInfo | SparseProductInfo, positions: int | None) -> None:
    name = type(info).__name__
    if info.seg_out is not None:
        seg = info.seg_out.cpu().long()
        if int(seg[0]) < 0 or bool((seg[1:] < seg[:-1]).any()) or (positions is not None and int(seg[-1]) > positions):
            raise ValueError(
                f"{name}.seg_out must ascend within 0 .. {positions} (the number of terms), but it is {seg}"
            )
    if info.index_out is not None:
        assert info.out_size is not None  # settled when the info was made
        _check_range("index_out", info.index_out, info.out_size, "rows of the output (out_size)")
        values, counts = info.index_out.unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(
                f"{name}.index_out must name each output row once, but row {int(values[counts > 1][0])} stands in it "
                f"{int(counts.max())} times; sum those terms in one segment instead"
            )


def _check_range(name: str, index: torch.Tensor | None, size: int, what: str) -> None:
    if index is None or index.numel() == 0:
        return
    low, high = (int(v) for v in torch.stack(torch.aminmax(index)).tolist())
    if low < 0 or high >= size:
        position = int(((index < 0) | (index >= size)).nonzero()[0])
        raise ValueError(
            f"{name} must lie within 0 .. {size - 1}, there being {size} {what}, "
            f"but entry {position} is {int(index[position])}"
        )


def _least_size(
    info: SparseScaleInfo | SparseProductInfo, index: torch.Tensor | None, known: int | None, name: str
) -> int:
    if known is not None:
        return known
    if index is not None:
        _check_range(name, index, 2**62, "rows at most")
        return int(index.max()) + 1 if index.numel() else 0
    # the index is t itself, so the largest t that occurs decides
    gather = getattr(info, "gather_index", None)
    if gather is not None:
        return int(gather.max()) + 1 if gather.numel() else 0
    return int(info.seg_out[-1]) if info.seg_out is not None else info.num_segments
