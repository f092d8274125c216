"""What tells tensors apart: SHA-256 of their bytes, or sums of them where they lie."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

#: bytes from which on a tensor on a GPU is summed there
SUMMED = 2**20
#: words that are summed together
PIECE = 2**21
#: odd factors below 2^63 in absolute value, of 64 bits
SCATTER = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in order, (size,) uint8.

    >>> bytes_of(torch.tensor([1, 2, 3], dtype=torch.int16)[::2]).tolist()
    [1, 0, 3, 0]
    """
    flat = values.detach().reshape(-1)
    if flat.stride(0) != 1:  # one number or none, of any stride, counts as contiguous, but has no bytes to view
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest(*parts: Any) -> str:
    """SHA-256 of texts and tensors; of a large one on a GPU, of its `sums`."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = sums(part) if part.is_cuda and part.nbytes > SUMMED else part
            found.update(bytes_of(part.cpu()).numpy().data)
        else:
            found.update(str(part).encode())
    return found.hexdigest()


def sums(values: torch.Tensor) -> torch.Tensor:
    """(2,) int64: a tensor's words of 32 bits, added up with two odd weights for each place, modulo 2^64.

    Weights are scattered numbers (the finalizer of MurmurHash3), so tensors that differ have other sums, but for a
    chance of some 2^-120. A GPU reads its memory in a hundredth of the time that SHA-256 takes on the CPU.
    """
    data = bytes_of(values)
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for first in range(0, len(words), PIECE):
        part = words[first : first + PIECE].long()
        places = torch.arange(first, first + len(part), device=values.device)
        for at in range(2):
            weights = places * 2 + at
            for factor in SCATTER:
                weights = (weights ^ (weights >> 33)) * factor
            total[at] += (part * ((weights ^ (weights >> 33)) | 1)).sum()
    return total
