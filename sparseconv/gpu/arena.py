"""Arrays cut from one allocation, which takes the CPU less time than one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.gpu.launcher import INTERPRETED, Pointer


class Arena(list[Pointer]):
    """The pointers of arrays cut from one allocation, each aligned to 128 bytes.

    Args:
        device: where they lie.
        dtypes: of the arrays; the last may be left out.
        lengths: of the arrays, in numbers.
        zeroed: the first arrays that start as zeros; the others start as the memory was.
    """

    def __init__(
        self, device: torch.device, dtypes: Sequence[torch.dtype], lengths: Sequence[int], zeroed: int = 0
    ) -> None:
        self._dtypes, self._lengths, self._starts, total = dtypes, lengths, list[int](), 0
        for dtype, length in zip(dtypes, lengths):
            self._starts.append(total)
            total += (length * dtype.itemsize + 127) & -128
        self.memory = torch.empty(total, dtype=torch.uint8, device=device)
        if zeroed:
            self.memory.narrow(0, 0, self._starts[zeroed] if zeroed < len(lengths) else total).zero_()
        address = self.memory.data_ptr()
        self.extend(map(self.tensor, range(len(lengths))) if INTERPRETED else [address + at for at in self._starts])

    def length_before(self, index: int) -> int:
        """Bytes before the i-th array."""
        return self._starts[index]

    def tensor(self, index: int) -> torch.Tensor:
        """The i-th array as a tensor that keeps the whole arena alive."""
        length = self._lengths[index] * self._dtypes[index].itemsize
        return self.memory.narrow(0, self._starts[index], length).view(self._dtypes[index])
