"""Arrays cut from one allocation, which costs the host less than one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.gpu.launcher import INTERPRETED, Pointer


class Kinds(tuple[torch.dtype, ...]):
    """The dtypes of an arena's arrays, one after another."""

    def __init__(self, _: Sequence[torch.dtype]) -> None:
        #: bytes of a number of each
        self.sizes = [dtype.itemsize for dtype in self]


def lay_out(kinds: Kinds, lengths: Sequence[int], start: int = 0) -> tuple[list[int], int]:
    """Where arrays begin that follow one another from ``start``, each aligned to 128 bytes, and where they end."""
    starts = []
    for size, length in zip(kinds.sizes, lengths):
        starts.append(start)
        start += (length * size + 127) & -128
    return starts, start


class Arena(list[Pointer]):
    """The pointers of arrays cut from one allocation, each aligned to 128 bytes.

    ``lengths`` are those of arrays of these ``kinds``, the last of which may be left out; the first ``zeroed`` of them
    start as zeros, the others as the memory was.
    """

    def __init__(self, device: torch.device, kinds: Kinds, lengths: Sequence[int], zeroed: int = 0) -> None:
        starts, total = lay_out(kinds, lengths)
        clean = (starts[zeroed] if zeroed < len(starts) else total) if zeroed else 0
        if clean and clean == total:
            memory = torch.zeros(total, dtype=torch.uint8, device=device)
        else:
            memory = torch.empty(total, dtype=torch.uint8, device=device)
            if clean:
                memory.narrow(0, 0, clean).zero_()
        self._cut(memory, memory.data_ptr(), kinds, lengths, starts)

    @classmethod
    def of(
        cls, memory: torch.Tensor, address: int, kinds: Kinds, lengths: Sequence[int], starts: Sequence[int]
    ) -> Arena:
        """Arrays that begin at these bytes of memory (B,) uint8 at an address, which others may share."""
        arena = cls.__new__(cls)
        arena._cut(memory, address, kinds, lengths, starts)
        return arena

    def _cut(
        self, memory: torch.Tensor, address: int, kinds: Kinds, lengths: Sequence[int], starts: Sequence[int]
    ) -> None:
        self.memory, self._kinds, self._lengths, self._starts = memory, kinds, lengths, starts
        self.extend(map(self.tensor, range(len(lengths))) if INTERPRETED else [address + at for at in starts])

    def length_before(self, index: int) -> int:
        """Bytes before the i-th array."""
        return self._starts[index]

    def length_of(self, index: int) -> int:
        """Numbers of the i-th array."""
        return self._lengths[index]

    def tensor(self, index: int) -> torch.Tensor:
        """The i-th array as a tensor that keeps the whole arena alive."""
        length = self._lengths[index] * self._kinds.sizes[index]
        return self.memory.narrow(0, self._starts[index], length).view(self._kinds[index])
