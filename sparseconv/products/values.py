"""The values of an info, looked at once: what kernels would otherwise read or write beyond memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from sparseconv import transforms
from sparseconv.checks import shortened

#: above every index: the limit where a size is not known
_ANY = 2**62


@dataclass(frozen=True)
class Input:
    """An input of a scale or a product: the name of its index column, that column, and its rows where known."""

    name: str
    index: torch.Tensor | None
    rows: int | None

    @property
    def size_name(self) -> str:
        """The info's field that says how many rows there are."""
        return f"in{self.name.removeprefix('index')}_size"


def least_rows(
    info: str,
    inputs: tuple[Input, ...],
    terms: int | None,
    seg_out: torch.Tensor | None,
    gather_index: torch.Tensor | None,
    index_out: torch.Tensor | None,
    num_rows: int,
) -> tuple[int, ...]:
    """The fewest rows that each input must have, after a look at every value, with one wait for the device.

    Args:
        info: the info's kind, named in errors.
        inputs: the columns that index inputs.
        terms: T where a column says it.
        seg_out, gather_index, index_out: the other columns of the info.
        num_rows: rows of the output.

    Returns:
        One number per input: its ``rows`` where known. Where there are no values (meta tensors, while torch traces),
        an unknown size counts as 0.

    Raises:
        ValueError: names the info, its field and the first bad entry.
    """
    columns = [seg_out, index_out, gather_index, *(given.index for given in inputs)]
    if any(column is not None and not _has_values(column) for column in columns):
        return tuple(given.rows or 0 for given in inputs)
    facts = _facts(*columns)
    positions = terms if gather_index is None else gather_index.shape[0]
    limits = [
        ("seg_out", _ANY if positions is None else positions + 1, "offsets of terms"),
        ("index_out", num_rows, "rows of the output (out_size)"),
        ("gather_index", _ANY if terms is None else terms, "terms"),
    ]
    for given in inputs:
        what = f"rows of the input ({given.size_name})"
        limits.append((given.name, _ANY if given.rows is None else given.rows, what))
    for column, (low, high, broken), (name, size, what) in zip(columns, facts, limits):
        if column is not None and (low < 0 or high >= size or broken):
            _refuse(info, name, column, size, what)
    # where an index is t itself, the largest t that occurs decides
    last_offset = facts[0][1] if seg_out is not None else num_rows if index_out is None else index_out.shape[0]
    identity = last_offset if gather_index is None else facts[2][1] + 1
    for given in inputs:
        if given.index is None and given.rows is not None and identity > given.rows:
            raise ValueError(
                f"{info}.{given.name} is None, so that term t reads row t, and terms reach {identity - 1}; but the "
                f"input has {given.rows} rows ({given.size_name}): pass {given.name}, or the size that the terms need"
            )
    found = (identity if given.index is None else high + 1 for given, (_, high, _) in zip(inputs, facts[3:]))
    return tuple(least if given.rows is None else given.rows for given, least in zip(inputs, found))


def _has_values(column: torch.Tensor) -> bool:
    """Whether a tensor holds numbers to look at: not on the meta device, not faked, not traced."""
    seen = type(column).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not (column.is_meta or torch.compiler.is_compiling() or seen)


@transforms.constant
def _facts(
    seg_out: torch.Tensor | None, index_out: torch.Tensor | None, *indices: torch.Tensor | None
) -> list[tuple[int, int, bool]]:
    """(least, greatest, broken) of each column; (0, -1, False) where it is absent or empty.

    seg_out is broken where it descends, index_out where an entry stands in it twice.
    """
    columns = [seg_out, index_out, *indices]
    facts: dict[int, torch.Tensor] = {}
    for place, column in enumerate(columns):
        if column is None or column.numel() == 0:
            continue
        low, high = (extreme.long() for extreme in torch.aminmax(column))
        broken = torch.zeros_like(low)
        if place == 0:
            broken = (column[1:] < column[:-1]).any().long()
        elif place == 1:
            ordered = column.sort().values
            broken = (ordered[1:] == ordered[:-1]).any().long()
        facts[place] = torch.stack([low, high, broken])
    read = dict(zip(facts, torch.stack(list(facts.values())).tolist())) if facts else {}
    return [
        (int(low), int(high), bool(bad)) for low, high, bad in (read.get(p, (0, -1, 0)) for p in range(len(columns)))
    ]


def _refuse(info: str, name: str, column: torch.Tensor, size: int, what: str) -> NoReturn:
    """Raise for a column that is known to be bad: say which entry, and why."""
    values = transforms.plain(column).cpu().long()
    if name == "seg_out":
        raise ValueError(
            f"{info}.seg_out must ascend within 0 .. {size - 1}, there being {size} {what}, but it is "
            f"{shortened(values.tolist())}: segment M runs from seg_out[M] to seg_out[M + 1] - 1"
        )
    outside = ((values < 0) | (values >= size)).nonzero()
    if len(outside):
        entry = int(outside[0])
        within = f"within 0 .. {size - 1}, there being {size} {what}" if size < _ANY else "at 0 or above"
        raise ValueError(f"{info}.{name} must lie {within}, but entry {entry} is {int(values[entry])}")
    rows, counts = values.unique(return_counts=True)
    raise ValueError(
        f"{info}.index_out must name each output row once, but row {int(rows[counts > 1][0])} stands in it "
        f"{int(counts.max())} times; sum those terms in one segment instead"
    )
