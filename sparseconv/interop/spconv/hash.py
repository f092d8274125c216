"""A table from integers to numbers, by sorting."""

from __future__ import annotations

import torch

from sparseconv.checks import as_device, check_kind, check_values
from sparseconv.interop.arguments import find_sorted


class HashTable:
    """Keys and values, on any device; it grows as needed.

    Args:
        device: of keys and values.
        key_dtype: int32 or int64.
        value_dtype: of 4 or 8 bytes: int32, int64, float32 or float64.
        max_size: accepted, without effect.

    >>> table = HashTable(torch.device("cpu"), torch.int32, torch.int64)
    >>> table.insert(torch.tensor([7, 3, 7], dtype=torch.int32), torch.tensor([1, 2, 3]))
    >>> values, missing = table.query(torch.tensor([3, 7, 5], dtype=torch.int32))
    >>> values.tolist(), missing.tolist()
    ([2, 3, 0], [False, False, True])
    """

    def __init__(
        self, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype, max_size: int = -1
    ) -> None:
        check_kind("key_dtype", key_dtype, torch.dtype, "pass torch.int32 or torch.int64")
        check_kind("value_dtype", value_dtype, torch.dtype, "pass torch.int32 or torch.int64")
        numbers = (torch.int32, torch.int64, torch.float32, torch.float64)
        if key_dtype not in numbers[:2] or value_dtype not in numbers:
            raise ValueError(f"keys are int32 or int64, values those or floats; got {key_dtype} and {value_dtype}")
        place = as_device(device)
        self.key_dtype, self.value_dtype, self.is_cpu = key_dtype, value_dtype, place.type == "cpu"
        #: each key once, ascending
        self._keys = torch.empty(0, dtype=key_dtype, device=place)
        self._values = torch.empty(0, dtype=value_dtype, device=place)

    def insert(self, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Take in keys (N,); a key that is there gets the new value, one given several times the last of them.

        Without values, new keys have 0 and others keep theirs.
        """
        self._check(keys, values)
        fresh = values
        if fresh is None:
            found, missing = self.query(keys)
            fresh = torch.where(missing, 0, found)
        every, held = torch.cat([self._keys, keys]), torch.cat([self._values, fresh])
        self._keys, place = torch.unique(every, return_inverse=True)
        last = torch.zeros_like(self._keys, dtype=torch.int64)
        last.scatter_reduce_(0, place, torch.arange(len(every), device=every.device), "amax")
        self._values = held[last]

    def query(self, keys: torch.Tensor, values: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (N,) of keys, 0 where absent, and whether each is absent; written to ``values`` where given."""
        self._check(keys, values)
        place, there = find_sorted(self._keys, keys)
        missing = ~there
        found = torch.zeros(len(keys), dtype=self.value_dtype, device=keys.device)
        found[there] = self._values[place[there]]
        return found if values is None else values.copy_(found), missing

    def insert_exist_keys(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Give keys that are there new values; (N,) uint8, 1 for keys that are not, which stay out."""
        self._check(keys, values)
        _, there = find_sorted(self._keys, keys)
        self.insert(keys[there], values[there])
        return (~there).to(torch.uint8)

    def assign_arange_(self) -> torch.Tensor:
        """Number the keys in the order of `items`; returns how many there are, (1,)."""
        self._values = torch.arange(len(self._keys), device=self._keys.device).to(self.value_dtype)
        return self._count()

    def items(self, max_size: int = -1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and their number (1,); ``max_size`` of them at most, where it is given."""
        end = len(self._keys) if max_size < 0 else max_size
        return self._keys[:end].clone(), self._values[:end].clone(), self._count()

    def _count(self) -> torch.Tensor:
        return torch.tensor([len(self._keys)], device=self._keys.device)

    def _check(self, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        for name, given, dtype in (("keys", keys, self.key_dtype), ("values", values, self.value_dtype)):
            if given is None:
                continue
            check_values(name, given, f"(N,) {dtype}")
            if given.dtype != dtype or given.ndim != 1 or len(given) != len(keys) or given.device != self._keys.device:
                raise ValueError(
                    f"{name} must be ({len(keys) if keys.ndim else 'N'},) {dtype} on {self._keys.device}; got "
                    f"{tuple(given.shape)} {given.dtype} on {given.device}"
                )
