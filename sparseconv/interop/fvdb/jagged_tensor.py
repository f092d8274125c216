"""Rows of a batch, item after item."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseconv.checks import INTEGERS, check_tensor, check_values, described, shortened
from sparseconv.torch_private import settable


class JaggedTensor:
    """One tensor of rows for each batch item, kept as one.

    Args:
        tensors: the rows of each item, or a tensor for one item.

    >>> rows = JaggedTensor([torch.zeros(2, 3), torch.ones(1, 3)])
    >>> len(rows), rows.joffsets.tolist(), rows.jidx.tolist(), rows[1].jdata.tolist()
    (2, [0, 2, 3], [0, 0, 1], [[1.0, 1.0, 1.0]])
    """

    def __init__(self, tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
        parts = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(parts, (list, tuple)) or not parts:
            raise TypeError(f"a JaggedTensor is made of a tensor, or a list of them; got {described(tensors)}")
        for part in parts:
            check_tensor("an item of a JaggedTensor", part)
        try:
            self._data = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        except RuntimeError as error:
            raise ValueError(f"items of a JaggedTensor must differ in rows alone: {error}") from None
        if self._data.ndim == 0:
            raise ValueError("items of a JaggedTensor must have rows; got a number")
        counts = torch.tensor([0, *map(len, parts)])
        self.joffsets = counts.cumsum(0).to(self._data.device)

    @classmethod
    def from_tensor(cls, data: torch.Tensor) -> JaggedTensor:
        """One item."""
        return cls(data)

    @classmethod
    def from_list_of_tensors(cls, tensors: Sequence[torch.Tensor]) -> JaggedTensor:
        """An item for each tensor."""
        return cls(tensors)

    @classmethod
    def from_data_and_offsets(cls, data: torch.Tensor, offsets: torch.Tensor) -> JaggedTensor:
        """Item b owns rows offsets[b] .. offsets[b + 1]."""
        check_tensor("data", data)
        check_values("offsets", offsets, "(B + 1,) integers")
        if data.ndim < 1 or offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype not in INTEGERS:
            raise ValueError(
                f"offsets must be (B + 1,) integers, and data rows; got {tuple(offsets.shape)} {offsets.dtype} and "
                f"{tuple(data.shape)}"
            )
        ends = offsets.tolist()
        if ends[0] != 0 or ends[-1] != len(data) or ends != sorted(ends):
            raise ValueError(f"offsets must ascend from 0 to the {len(data)} rows of data; got {shortened(ends)}")
        return cls._of(data, offsets.to(data.device))

    @classmethod
    def _of(cls, data: torch.Tensor, offsets: torch.Tensor) -> JaggedTensor:
        """Rows and offsets that go together."""
        made = object.__new__(cls)
        made.joffsets, made._data = offsets, data
        return made

    @settable
    def jdata(self) -> torch.Tensor:
        """All rows."""
        return self._data

    @jdata.setter
    def jdata(self, data: torch.Tensor) -> None:
        check_tensor("jdata", data)
        if data.ndim < 1 or len(data) != len(self._data):
            raise ValueError(f"jdata must have {len(self._data)} rows; got {tuple(data.shape)}")
        self._data = data

    @property
    def jidx(self) -> torch.Tensor:
        """The item of each row, int32."""
        items = torch.arange(len(self), dtype=torch.int32, device=self._data.device)
        return items.repeat_interleave(self.joffsets.diff(), output_size=len(self._data))

    @property
    def num_tensors(self) -> int:
        return len(self.joffsets) - 1

    @property
    def dtype(self) -> torch.dtype:
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def lshape(self) -> list[int]:
        """How many rows each item has."""
        found: list[int] = self.joffsets.diff().tolist()
        return found

    def __len__(self) -> int:
        return self.num_tensors

    def __getitem__(self, item: int) -> JaggedTensor:
        return JaggedTensor(self.unbind()[item])

    def unbind(self) -> list[torch.Tensor]:
        """The rows of each item."""
        return list(self._data.split(self.lshape))

    def jagged_like(self, data: torch.Tensor) -> JaggedTensor:
        """Other rows in the same items."""
        made = JaggedTensor._of(self._data, self.joffsets)
        made.jdata = data
        return made

    def to(self, place: torch.device | str | torch.dtype) -> JaggedTensor:
        """On another device, or in another dtype."""
        data = self._data.to(place)
        return JaggedTensor._of(data, self.joffsets.to(data.device))

    def requires_grad_(self, requires_grad: bool = True) -> JaggedTensor:
        """torch's, of the rows."""
        self._data.requires_grad_(requires_grad)
        return self

    def check_items(self, name: str, offsets: torch.Tensor) -> None:
        """Raise ValueError unless items end at these rows; the same tensor of them is not read."""
        mine = self.joffsets
        if mine is not offsets and mine.device == offsets.device and not torch.equal(mine, offsets.to(mine.dtype)):
            raise ValueError(f"items have {self.lshape} rows, those of {name} {offsets.diff().tolist()}")

    def _with(self, function: Callable[..., torch.Tensor], other: Any) -> JaggedTensor:
        if isinstance(other, JaggedTensor):
            self.check_items("the other JaggedTensor", other.joffsets)
            other = other._data
        return self.jagged_like(function(self._data, other))

    def __add__(self, other: Any) -> JaggedTensor:
        return self._with(operator.add, other)

    def __sub__(self, other: Any) -> JaggedTensor:
        return self._with(operator.sub, other)

    def __mul__(self, other: Any) -> JaggedTensor:
        return self._with(operator.mul, other)

    def __truediv__(self, other: Any) -> JaggedTensor:
        return self._with(operator.truediv, other)
