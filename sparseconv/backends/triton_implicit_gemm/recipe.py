"""What recipes share. A recipe knows all of a launch but the map, and is kept for every map of about its size.

It holds compiled kernels; a step adds addresses and sizes. So the first use of a layer on a new map costs little more
than any other.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from sparseconv.backends.triton_implicit_gemm.config import Work
from sparseconv.gpu.program import Program, program_of
from sparseconv.torch_private import allows_tf32

#: offsets from a pointer that a kernel may compute in 32 bits
NARROW = 2**31
I32, I64 = torch.int32, torch.int64


def compiled(kernel: Any, types: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int) -> Program:
    return program_of(kernel, types, tuple(constants.items()), warps, stages)


class Kept(dict[tuple[Any, ...], Any]):
    """What a recipe has made of its arguments: the kernels for maps of different kinds."""

    def __call__(self, make: Any, *args: Any) -> Any:
        key = (make.__name__, *args)
        found = self.get(key)
        if found is None:
            found = self[key] = make(*args)
        return found


def shown(stride: int) -> Any:
    """A stride as a kernel is compiled for it: the compiler knows whether it is a multiple of 16."""
    return 16 if stride % 16 == 0 else int


def operands_of(work: Work, unit: int, wide: bool) -> dict[str, Any]:
    """What kernels are compiled for, whatever their tiles."""
    return {
        "UNIT": unit,
        "GROUP_IN": work.group_in,
        "GROUP_OUT": work.group_out,
        "PACK": work.pack,
        "GROUPS": work.groups,
        "WIDE": wide,
        "HIDDEN": not interpreted(),
        "PRECISION": work.precision,
    }


def unit_of(work: Work, *strides: int) -> int:
    """The factor of every stride that makes 16 bytes, where it is one; else 1."""
    unit = 16 // work.dtype.itemsize
    return unit if work.aligned and not any(stride % unit for stride in strides) else 1


#: torch.backends.cuda.matmul.allow_tf32 without its look for a name, which takes a microsecond
_allows_tf32 = allows_tf32


def precision_of(dtype: torch.dtype) -> str:
    """How products of fp32 numbers are taken, by torch's own switch; halves have one way only."""
    return "tf32" if dtype != torch.float32 or _allows_tf32() else "ieee"


@functools.cache
def kernel_named(name: str, module: str) -> Any:
    return getattr(importlib.import_module(f"sparseconv.backends.triton_implicit_gemm.{module}"), name)


@functools.cache
def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1 when they were first imported)."""
    try:
        return type(kernel_named("conv_kernel", "kernels")).__name__ == "InterpretedFunction"
    except ImportError:
        return False
