"""The frozen structures that say which rows a sparse scale or product reads, weighs, sums and writes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sparseconv.kinds import as_device, check_count, check_tensor
from sparseconv.products.terms import Terms, make_terms
from sparseconv.products.values import Input, least_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

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

    scale: Float[torch.Tensor, " T"] | None  # (T,) floating; None: 1
    index: Integer[torch.Tensor, " T"] | None  # (T,) int32 or int64, rows of the input; None: t
    seg_out: Integer[torch.Tensor, " S+1"] | None  # (S + 1,) int32 or int64, ascending; None: no sum, S = T
    index_out: (
        Integer[torch.Tensor, " S"] | None
    )  # (S,) rows of the output, no two alike, others stay zero; None: row M
    out_size: int | None  # rows of the output; None: S
    in_size: int | None = None  # rows of the input, where known
    terms: Terms = field(init=False, repr=False)
    device: torch.device | None = field(init=False, repr=False)  # of the tensors; None where every field is None
    least_in_size: int = field(init=False, repr=False)  # the fewest input rows that the indices fit in

    def __post_init__(self) -> None:
        self._settle(None)

    def _settle(self, least: tuple[int, ...] | None) -> None:
        """Check and complete the fields; ``least`` where the values of the indices are known to be right."""
        terms = _same_length(self, ("scale", "index"))
        _settle_out_size(self, terms if terms is not None else self.in_size)
        if least is None:
            least = self._look(self.in_size)
        # plain attributes, made now: torch.compile reads them as constants, where it cannot trace a cached property
        object.__setattr__(self, "least_in_size", least[0])
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

    def to(self, device: torch.device | str) -> SparseScaleInfo:
        """The same info on another device."""
        return _moved(self, device)

    def validate(self, in_size: int | None = None) -> SparseScaleInfo:
        """Looks at every value anew and returns the info itself; ValueError names the first bad entry."""
        in_size = self.in_size if in_size is None else in_size
        self._look(in_size)
        return self

    def _look(self, in_size: int | None) -> tuple[int, ...]:
        inputs = (Input("index", self.index, in_size),)
        terms = _terms(self.scale, self.index)
        return least_rows("SparseScaleInfo", inputs, terms, self.seg_out, None, self.index_out, self.num_rows)


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

    scale: Float[torch.Tensor, " T"] | None  # (T,) floating; None: 1
    index1: Integer[torch.Tensor, " T"] | None  # (T,) int32 or int64, rows of the first input; None: t
    index2: Integer[torch.Tensor, " T"] | None  # (T,) int32 or int64, rows of the second input; None: t
    seg_out: (
        Integer[torch.Tensor, " S+1"] | None
    )  # (S + 1,) int32 or int64, ascending; None: no sum, one segment for each k
    gather_index: Integer[torch.Tensor, " Q"] | None  # (Q,) int32 or int64, the t of position k; None: k
    index_out: (
        Integer[torch.Tensor, " S"] | None
    )  # (S,) rows of the output, no two alike, others stay zero; None: row M
    out_size: int | None  # rows of the output; None: S
    in1_size: int | None = None  # rows of the first input, where known
    in2_size: int | None = None  # rows of the second input, where known
    terms: Terms = field(init=False, repr=False)
    device: torch.device | None = field(init=False, repr=False)  # of the tensors; None where every field is None
    least_in_sizes: tuple[int, int] = field(init=False, repr=False)  # the fewest rows of each that the indices fit in

    def __post_init__(self) -> None:
        self._settle(None)

    def _settle(self, least: tuple[int, ...] | None) -> None:
        """Check and complete the fields; ``least`` where the values of the indices are known to be right."""
        terms = _same_length(self, ("scale", "index1", "index2"))
        positions = terms if self.gather_index is None else self.gather_index.shape[0]
        _settle_out_size(self, positions if positions is not None else self.in1_size)
        if least is None:
            least = self._look(self.in1_size, self.in2_size)
        # plain attributes, made now: torch.compile reads them as constants, where it cannot trace a cached property
        object.__setattr__(self, "least_in_sizes", least)
        columns = (self.scale, self.index1, self.index2, self.seg_out, self.gather_index, self.index_out)
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

    def to(self, device: torch.device | str) -> SparseProductInfo:
        """The same info on another device."""
        return _moved(self, device)

    def validate(self, in1_size: int | None = None, in2_size: int | None = None) -> SparseProductInfo:
        """Looks at every value anew and returns the info itself; ValueError names the first bad entry."""
        in1_size = self.in1_size if in1_size is None else in1_size
        in2_size = self.in2_size if in2_size is None else in2_size
        self._look(in1_size, in2_size)
        return self

    def _look(self, in1_size: int | None, in2_size: int | None) -> tuple[int, ...]:
        inputs = Input("index1", self.index1, in1_size), Input("index2", self.index2, in2_size)
        terms, columns = _terms(self.scale, self.index1, self.index2), (self.seg_out, self.gather_index, self.index_out)
        return least_rows("SparseProductInfo", inputs, terms, *columns, self.num_rows)


def known_right(kind: type[_AnyInfo], *values: Any, least: tuple[int, ...] | None = None) -> _AnyInfo:
    """The info of these fields, in their order, without a look at values that are right by how they were made.

    Nothing waits for a device. ``least``: the fewest rows of each input that the indices fit in, where the fields do
    not say how many rows the inputs have.
    """
    info = object.__new__(kind)
    for column, value in zip((column for column in fields(kind) if column.init), values):
        object.__setattr__(info, column.name, value)
    info._settle(values[len(values) - (1 if kind is SparseScaleInfo else 2) :] if least is None else least)
    return info


def _tensors(info: SparseScaleInfo | SparseProductInfo) -> dict[str, torch.Tensor]:
    named = {column.name: getattr(info, column.name) for column in fields(info) if column.init}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _device(info: SparseScaleInfo | SparseProductInfo) -> torch.device | None:
    return next((tensor.device for tensor in _tensors(info).values()), None)


def _moved(info: _AnyInfo, device: torch.device | str) -> _AnyInfo:
    if isinstance(device, torch.dtype):
        raise TypeError(
            f"{type(info).__name__}.to takes a device, but it was given the dtype {device}: every call sums in the "
            "dtype of its inputs; dataclasses.replace(info, scale=info.scale.to(dtype)) gives scales of another dtype"
        )
    to = as_device(device)
    values = (getattr(info, column.name) for column in fields(info) if column.init)
    least = info.least_in_sizes if isinstance(info, SparseProductInfo) else (info.least_in_size,)
    moved = (value.to(to) if isinstance(value, torch.Tensor) else value for value in values)
    return known_right(type(info), *moved, least=least)


def _terms(*columns: torch.Tensor | None) -> int | None:
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
    for given in fields(info):
        value = getattr(info, given.name) if given.init else None
        if value is not None and given.name.endswith("_size"):
            check_count(f"{name}.{given.name}", value)
        elif value is not None:
            check_tensor(f"{name}.{given.name}", value)
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
