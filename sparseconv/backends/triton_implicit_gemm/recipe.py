"""What recipes share. A recipe knows all of a launch but the map, and is kept for every map of about its size.

It holds compiled kernels; a step adds addresses and sizes. So the first use of a layer on a new map costs little more
than any other.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.backends.triton_implicit_gemm.config import SIZES_AN_OCTAVE, Work
from sparseconv.gpu.program import Program, program_of
from sparseconv.torch_private import allows_tf32

if TYPE_CHECKING:
    from sparseconv.backends.base import Request
    from sparseconv.geometry.kernel_map import KernelMap

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


def precision_of(dtype: torch.dtype) -> str:
    """How products of fp32 numbers are taken, by torch's own switch; halves have one way only."""
    return "tf32" if dtype != torch.float32 or allows_tf32() else "ieee"


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


def work_of(request: Request, aligned: bool, transposed: bool = False) -> Work:
    """The estimate's view of a request: of its forward and weight gradient, or, transposed, of its input gradient.

    Maps of one size are one to it: what is chosen and compiled for one serves all. A part of a map counts as that map.
    """
    kernel_map, groups = request.kernel_map, request.groups
    channels = (request.c_in // groups, request.c_out // groups)
    channels = channels[::-1] if transposed else channels
    num_rows = round(2 ** (octave(kernel_map, transposed) / SIZES_AN_OCTAVE))
    processors, capability = card_of(request.device) if request.device.type == "cuda" else (132, (0, 0))
    return Work(
        request.dtype,
        num_rows,
        kernel_map.num_taps,
        *channels,
        groups,
        aligned,
        processors,
        capability,
        transposed,
        precision_of(request.dtype),
    )


def octave(kernel_map: KernelMap, transposed: bool) -> int:
    """The order of magnitude of the output rows, in parts of a power of two."""
    sizes = kernel_map.part_of or kernel_map
    return round(SIZES_AN_OCTAVE * math.log2(max(1, sizes.num_in if transposed else sizes.num_out)))


@functools.cache
def card_of(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and compute capability."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def are_aligned(*operands: tuple[torch.Tensor, int]) -> bool:
    """Whether the rows of all operands, given with the numbers from one to the next, start at multiples of 16 bytes."""
    return not any(t.data_ptr() % 16 or stride * t.element_size() % 16 for t, stride in operands)
