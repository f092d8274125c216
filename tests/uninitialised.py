"""Memory that nobody has written holds NaN, and integers that no row or voxel has: a result that reads it is wrong at
once, and not only where memory happened to be used before."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch

#: the byte of floating-point numbers, NaN in every width, and of bytes, which may be a buffer of anything
NAN = 0xFF
#: the byte of integers: large and positive, for -1 says "none" in many tables
LARGE = 0x7F
#: bytes that are filled at most: some tests ask for more than there is, and touch little of it
MOST = 64 << 20


def fill_uninitialised() -> None:
    """Fill what ``torch.empty`` and its kin, ``numpy.empty`` and ``sparseconv.memory`` make on the CPU."""
    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            setattr(owner, name, _filled(getattr(owner, name)))
    for name in ("empty", "empty_like"):
        setattr(np, name, _filled_array(getattr(np, name)))
    from sparseconv import memory

    memory._piece = _filled_array(memory._piece)  # type: ignore[assignment]


def _filled(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        out = make(*args, **kwargs)
        if torch.compiler.is_compiling() or "out" in kwargs:
            return out
        if type(out) is torch.Tensor and out.device.type == "cpu" and out.layout is torch.strided:
            try:
                storage = out.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):  # of a transform: it has no memory of its own
                return out
            _fill(place, size, out.is_floating_point() or out.is_complex() or out.dtype is torch.uint8, out.dtype)
        return out

    return made


def _filled_array(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        out = make(*args, **kwargs)
        if type(out) is np.ndarray and out.dtype.kind in "fciub" and out.flags.forc:
            _fill(out.ctypes.data, out.nbytes, out.dtype.kind in "fc" or out.dtype == np.uint8, out.dtype)
        return out

    return made


def _fill(place: int, size: int, is_nan: bool, dtype) -> None:
    if place and size:
        ctypes.memset(place, NAN if is_nan else 1 if dtype in (torch.bool, np.bool_) else LARGE, min(size, MOST))
