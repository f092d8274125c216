"""The frozen structures that say which rows a sparse scale or product reads, weighs, sums and writes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from sparseconv.checks import as_device, check_count, check_tensor
from sparseconv.products.terms import Terms, make_terms
from sparseconv.products.values import Input, least_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

_INDEX_DTYPES = (torch.int32, torch.int64)
AnyInfo = TypeVar("AnyInfo", bound="Info")


@dataclass(frozen=True, eq=False)
class Info:
    """What both kinds of info have in common: what is made of the columns that they are given.

    All of it is plain attributes, made at once: torch.compile reads them as constants, where it cannot trace a cached
    property.
    """

    _inputs: ClassVar[dict[str, str]]  # the columns that index inputs, each with the field that says how many rows

    terms: Terms = field(init=False, repr=False)
    device: torch.device | None = field(init=False, repr=False)  # of the tensors; None where every field is None
    in_sizes: tuple[int | None, ...] = field(init=False, repr=False)  # rows of each input, where known
    least_in_sizes: tuple[int, ...] = field(init=False, repr=False)  # the fewest rows of each that the indices fit in

    def __post_init__(self) -> None:
        self._settle(None)

    def _settle(self, least: tuple[int, ...] | None) -> None:
        """Check and complete the fields; ``least`` where the values of the indices are known to be right."""
        _check_columns(self)
        given = _given(self)
        object.__setattr__(self, "in_sizes", tuple(given[size] for size in self._inputs.values()))
        positions = _terms(given, "gather_index", "scale", *self._inputs)
        rows = _out_size(type(self).__name__, given, self.in_sizes[0] if positions is None else positions)
        object.__setattr__(self, "out_size", rows)
        object.__setattr__(self, "least_in_sizes", self._look(*self.in_sizes) if least is None else least)
        index1, index2, *_ = (*(given[index] for index in self._inputs), None)
        columns = (given["scale"], index1, index2, given["seg_out"], given.get("gather_index"), given["index_out"])
        object.__setattr__(self, "terms", make_terms(*columns, rows))
        object.__setattr__(self, "device", _device(given))

    def _look(self, *sizes: int | None) -> tuple[int, ...]:
        """The fewest rows of each input, of which ``sizes`` are known, after a look at every value."""
        given = _given(self)
        inputs = tuple(Input(index, given[index], size) for index, size in zip(self._inputs, sizes))
        columns = given["seg_out"], given.get("gather_index"), given["index_out"]
        terms = _terms(given, "scale", *self._inputs)
        return least_rows(type(self).__name__, inputs, terms, *columns, given["out_size"])

    @property
    def num_rows(self) -> int:
        """The rows of the output, known where ``out_size`` was None too."""
        return self.terms.out_size

    @property
    def num_segments(self) -> int:
        """S, the number of output rows that are written."""
        return self.terms.num_segments

    def to(self: AnyInfo, device: torch.device | str) -> AnyInfo:
        """The same info on another device."""
        if isinstance(device, torch.dtype):
            raise TypeError(
                f"{type(self).__name__}.to takes a device, but it was given the dtype {device}: every call sums in the "
                "dtype of its inputs; dataclasses.replace(info, scale=info.scale.to(dtype)) gives scales of another "
                "dtype"
            )
        to = as_device(device)
        moved = (value.to(to) if isinstance(value, torch.Tensor) else value for value in _given(self).values())
        return known_right(type(self), *moved, least=self.least_in_sizes)


@dataclass(frozen=True, eq=False)
class SparseScaleInfo(Info):
    """Which rows a sparse scale sums, and with which factors.

        z[n, row(M), c] = sum over t in seg_out[M] .. seg_out[M+1]-1 of scale[t] * x[n, index[t], c]

    Every field may be None, which is the default, with the meaning given in its comment. ``out_size`` may also come
    fourth, without ``index_out``: ``SparseScaleInfo(scale, index, seg_out, out_size)``. ``in_size`` is what a builder
    knows beyond the formula; it lets a call check its input without looking at the indices.

    Example::

        >>> import torch
        >>> from sparseconv.products import SparseScaleInfo, sparse_scale
        >>> scale, index, seg_out = torch.tensor([1.0, 10.0, 1.0]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
        >>> info = SparseScaleInfo(scale, index, seg_out, out_size=2)
        >>> sparse_scale(torch.tensor([[1.0], [2.0]]), info)
        tensor([[21.],
                [ 2.]])
    """

    scale: Float[torch.Tensor, " T"] | None = None  # (T,) floating; None: 1
    index: Integer[torch.Tensor, " T"] | None = None  # (T,) int32 or int64, rows of the input; None: t
    seg_out: Integer[torch.Tensor, " S+1"] | None = None  # (S + 1,) int32 or int64, ascending; None: no sum, S = T
    index_out: Integer[torch.Tensor, " S"] | None = (
        None  # (S,) rows of the output, no two alike, others stay zero; None: row M
    )
    out_size: int | None = None  # rows of the output; None: S
    in_size: int | None = None  # rows of the input, where known
    _inputs: ClassVar[dict[str, str]] = {"index": "in_size"}

    def __post_init__(self) -> None:
        if isinstance(self.index_out, int) and self.out_size is None:  # out_size as the fourth of four fields
            object.__setattr__(self, "out_size", self.index_out)
            object.__setattr__(self, "index_out", None)
        super().__post_init__()

    @property
    def least_in_size(self) -> int:
        """The fewest input rows that the indices fit in."""
        return self.least_in_sizes[0]

    def validate(self, in_size: int | None = None) -> SparseScaleInfo:
        """Check every value again and return the info; a ValueError names the first bad entry."""
        self._look(self.in_size if in_size is None else in_size)
        return self


@dataclass(frozen=True, eq=False)
class SparseProductInfo(Info):
    """Which pairs of rows a sparse product multiplies, with which factors, and where their sums go.

        z[n, row(M)] = sum over k in seg_out[M] .. seg_out[M+1]-1, with t = gather_index[k], of
                       scale[t] * x[n, index1[t]] o y[n, index2[t]]

    Every field may be None, which is the default, with the meaning in its comment. ``in1_size`` and ``in2_size`` are
    what a builder knows beyond the formula; they let a call check its inputs without looking at the indices.

    Example::

        >>> import torch
        >>> from sparseconv.products import SparseProductInfo, sparse_mul
        >>> index1, index2, seg_out = torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([0, 2])
        >>> info = SparseProductInfo(None, index1, index2, seg_out, None, None, 1)
        >>> sparse_mul(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), info)
        tensor([[10.]])
    """

    scale: Float[torch.Tensor, " T"] | None = None  # (T,) floating; None: 1
    index1: Integer[torch.Tensor, " T"] | None = None  # (T,) int32 or int64, rows of the first input; None: t
    index2: Integer[torch.Tensor, " T"] | None = None  # (T,) int32 or int64, rows of the second input; None: t
    seg_out: Integer[torch.Tensor, " S+1"] | None = (
        None  # (S + 1,) int32 or int64, ascending; None: no sum, one segment for each k
    )
    gather_index: Integer[torch.Tensor, " Q"] | None = None  # (Q,) int32 or int64, the t of position k; None: k
    index_out: Integer[torch.Tensor, " S"] | None = (
        None  # (S,) rows of the output, no two alike, others stay zero; None: row M
    )
    out_size: int | None = None  # rows of the output; None: S
    in1_size: int | None = None  # rows of the first input, where known
    in2_size: int | None = None  # rows of the second input, where known
    _inputs: ClassVar[dict[str, str]] = {"index1": "in1_size", "index2": "in2_size"}

    def validate(self, in1_size: int | None = None, in2_size: int | None = None) -> SparseProductInfo:
        """Check every value again and return the info; a ValueError names the first bad entry."""
        in1_size = self.in1_size if in1_size is None else in1_size
        in2_size = self.in2_size if in2_size is None else in2_size
        self._look(in1_size, in2_size)
        return self


def known_right(kind: type[AnyInfo], *values: Any, least: tuple[int, ...] | None = None) -> AnyInfo:
    """The info of these fields, in their order, without a look at values that are right by how they were made.

    Nothing waits for a device. ``least``: the fewest rows of each input that the indices fit in, where the fields do
    not say how many rows the inputs have.
    """
    info = object.__new__(kind)
    for column, value in zip((column for column in fields(kind) if column.init), values):
        object.__setattr__(info, column.name, value)
    info._settle(values[len(values) - len(kind._inputs) :] if least is None else least)
    return info


def _given(info: Info) -> dict[str, Any]:
    """The fields that an info was made of, by name."""
    return {column.name: getattr(info, column.name) for column in fields(info) if column.init}


def _tensors(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def _device(given: dict[str, Any]) -> torch.device | None:
    return next((tensor.device for tensor in _tensors(given).values()), None)


def _terms(given: dict[str, Any], *columns: str) -> int | None:
    """The length of the first of these columns that is there."""
    return next((given[column].shape[0] for column in columns if given.get(column) is not None), None)


def _check_columns(info: Info) -> None:
    """Ranks, dtypes, devices and lengths, none of which needs a look at a value."""
    name, given = type(info).__name__, _given(info)
    for column, value in given.items():
        if value is not None and column.endswith("_size"):
            check_count(f"{name}.{column}", value)
        elif value is not None:
            check_tensor(f"{name}.{column}", value)
    device = _device(given)
    for column, tensor in _tensors(given).items():
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
    lengths = {column: given[column].shape[0] for column in ("scale", *info._inputs) if given[column] is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name} needs one entry for each term in every column, but the lengths are {lengths}")


def _out_size(name: str, given: dict[str, Any], terms: int | None) -> int:
    """The rows of the output: those given, or the number of segments."""
    seg_out, index_out, out_size = given["seg_out"], given["index_out"], given["out_size"]
    if seg_out is not None and seg_out.shape[0] == 0:
        raise ValueError(f"{name}.seg_out must have S + 1 entries, at least one, but it is empty")
    segments = seg_out.shape[0] - 1 if seg_out is not None else terms
    if index_out is not None:
        if segments is not None and index_out.shape[0] != segments:
            raise ValueError(
                f"{name}.index_out names the row of each segment: {segments} segments need as many entries, "
                f"but it has {index_out.shape[0]}"
            )
        if out_size is None:
            raise ValueError(f"{name}.out_size must be given with index_out, which may leave rows at the end empty")
        return out_size
    if out_size is None:
        if segments is None:
            raise ValueError(f"{name}.out_size must be given where no field says how many rows the output has")
        return segments
    if segments is not None and out_size != segments:
        raise ValueError(
            f"{name} without index_out writes segment M to row M, so out_size must be the number of segments: "
            f"got out_size {out_size} and {segments} segments; give index_out, or repeat offsets in seg_out"
        )
    return out_size
