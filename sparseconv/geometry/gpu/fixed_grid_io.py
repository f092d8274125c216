"""A scene's rows put into the arrays of a grid of fixed size, in one launch, and a fault noted in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.gpu.launcher import Launcher, ceil_div, pointer

#: words that a program moves
BLOCK = 2048


def put_scene_on_gpu(coords: torch.Tensor, into: torch.Tensor, count: torch.Tensor, filled: int) -> None:
    """`geometry.fixed_grid_io.put_scene` of contiguous int32 arrays that begin at multiples of 16 bytes."""
    n, columns = coords.shape
    most = max(n, filled)
    args = (pointer(coords), pointer(into), pointer(count), n * columns, most * columns, n)
    _PUT(into.device, (max(1, ceil_div(most * columns, BLOCK)),), args, (BLOCK,))


@triton.jit
def put_kernel(coords_ptr, into_ptr, count_ptr, words, most, n, BLOCK: tl.constexpr):
    """into[:words] = coords, into[words:most] = -1, and count = n."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(into_ptr + word, tl.load(coords_ptr + word, mask=word < words, other=-1), mask=word < most)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, n)


def note_fault_on_gpu(fault: torch.Tensor, is_bad: torch.Tensor, bit: int) -> None:
    """`geometry.fixed_grid_io.note_fault`; other streams may set other bits meanwhile."""
    flag = is_bad.int().view(1)
    _NOTE(fault.device, (1,), (pointer(flag), pointer(fault)), (bit,))


@triton.jit
def note_kernel(is_bad_ptr, fault_ptr, BIT: tl.constexpr):
    """fault |= BIT where something is bad."""
    if tl.load(is_bad_ptr) != 0:
        tl.atomic_or(fault_ptr, BIT, sem="relaxed")


_I32 = torch.int32
_PUT = Launcher(put_kernel, (_I32, _I32, _I32, int, int, int))
_NOTE = Launcher(note_kernel, (_I32, _I32))
