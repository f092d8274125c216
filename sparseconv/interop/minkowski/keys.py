"""The names of sets of voxels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparseconv.interop.arguments import settled, whole
from sparseconv.kinds import check_kind

#: tensor stride and a string that tells apart sets of one stride
Key = tuple[tuple[int, ...], str]


class CoordinateMapKey:
    """The name of a set of voxels in a coordinate manager: its tensor stride, and a string.

    Args:
        size_or_stride: the number of columns of the coordinates, for a key that a layer sets later; or the tensor
            stride, one integer an axis.
        string_id: tells apart sets of one tensor stride; given, it makes a key that is set.

    >>> key = CoordinateMapKey([2, 2], "")
    >>> key, key.get_tensor_stride(), CoordinateMapKey(3).is_key_set()
    (coordinate map key:[2, 2], [2, 2], False)
    """

    def __init__(self, size_or_stride: int | Sequence[int], string_id: str | None = None) -> None:
        self._key: Key | None = None
        if isinstance(size_or_stride, int):
            (self._size,) = whole([size_or_stride], "size_or_stride", 2)
        else:
            stride = whole(size_or_stride, "size_or_stride", 0)
            self._size = len(stride) + 1
            self.set_key(stride, "" if string_id is None else string_id)

    @classmethod
    def of(cls, key: Key) -> CoordinateMapKey:
        """The key object of a stride and a string."""
        return cls(list(key[0]), key[1])

    @property
    def key(self) -> Key:
        """The stride and the string; raises ValueError where no layer has set them yet."""
        if self._key is None:
            raise ValueError("this coordinate map key is not set: a layer sets it when it makes its output's voxels")
        return settled(self._key[0]), self._key[1]

    def is_key_set(self) -> bool:
        return self._key is not None

    def get_coordinate_size(self) -> int:
        """Columns of the coordinates, the batch included."""
        return self._size

    def get_key(self) -> tuple[list[int], str]:
        return list(self.key[0]), self.key[1]

    def set_key(self, stride: Any, string_id: str | None = None) -> None:
        """Set the stride and the string, given apart or as one pair."""
        if string_id is None:
            stride, string_id = stride
        stride = whole(stride, "stride", 0)
        check_kind("string_id", string_id, str, "pass the string that tells apart sets of one stride")
        if len(stride) + 1 != self._size:
            raise ValueError(f"a key of {self._size} columns takes a stride of {self._size - 1} axes; got {stride}")
        self._key = tuple(stride), string_id

    def get_tensor_stride(self) -> list[int]:
        return list(self.key[0])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CoordinateMapKey)
            and self._key is not None
            and (other._key is not None and self.key == other.key)
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        if self._key is None:
            return "coordinate map key:not set"
        return f"coordinate map key:{list(self._key[0])}" + (f":{self._key[1]}" if self._key[1] else "")
