"""Kernels with all that they are compiled for, and launches of them over one map.

A spec knows all of a launch but the map, and is kept for every map of about its size. It holds compiled kernels; a step
adds addresses and sizes. So the first use of a layer on a new map costs little more than any other.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparseconv.backends.base import swap_channels
from sparseconv.backends.triton_implicit_gemm.config import (
    PARTIAL_BYTES,
    SIZES_AN_OCTAVE,
    ConvConfig,
    ProblemSize,
    WeightGradConfig,
)
from sparseconv.geometry.gpu.work_lists import jobs_of, schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.cuda_capability import PTX_FROM, precision_of
from sparseconv.gpu.program import Fixed, Launch, Program, power_of_2, program_of
from sparseconv.gpu.streams import scratch

if TYPE_CHECKING:
    from sparseconv.backends.base import Request
    from sparseconv.pointwise import Epilogue

#: offsets from a pointer that a kernel may compute in 32 bits
INT32_OFFSETS = 2**31
I32, I64 = torch.int32, torch.int64


def specialized(stride: int) -> Any:
    """A stride as a kernel is compiled for it: the compiler knows whether it is a multiple of 16."""
    return 16 if stride % 16 == 0 else int


def problem_constants(problem: ProblemSize, unit: int, index64: bool) -> dict[str, Any]:
    """What kernels are compiled for, whatever their tiles."""
    return {
        "UNIT": unit,
        "GROUP_IN": problem.group_in,
        "GROUP_OUT": problem.group_out,
        "PACK": problem.pack,
        "GROUPS": problem.groups,
        "INDEX64": index64,
        "ASM_LOADS": not interpreted() and problem.capability >= PTX_FROM,
        "PRECISION": problem.precision,
    }


def unit_of(problem: ProblemSize, *strides: int) -> int:
    """The factor of every stride that makes 16 bytes, where it is one; else 1."""
    unit = 16 // problem.dtype.itemsize
    return unit if problem.aligned and not any(stride % unit for stride in strides) else 1


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


def problem_size(request: Request, aligned: bool, transposed: bool = False) -> ProblemSize:
    """The estimate's view of a request: of its forward and weight gradient, or, transposed, of its input gradient.

    Maps of one size are one to it: what is chosen and compiled for one serves all. A part of a map counts as that map.
    """
    kernel_map, groups = request.kernel_map, request.groups
    channels = (request.c_in // groups, request.c_out // groups)
    channels = channels[::-1] if transposed else channels
    num_rows = round(2 ** (octave(kernel_map, transposed) / SIZES_AN_OCTAVE))
    processors, capability = card_of(request.device) if request.device.type == "cuda" else (132, (0, 0))
    return ProblemSize(
        request.dtype,
        num_rows,
        kernel_map.num_taps,
        *channels,
        groups,
        aligned,
        processors,
        capability,
        transposed,
        precision_of(request.dtype, request.device),
    )


def octave(kernel_map: KernelMap, transposed: bool) -> int:
    """The order of magnitude of the output rows, in parts of a power of two."""
    sizes = kernel_map.part_of or kernel_map
    return round(SIZES_AN_OCTAVE * math.log2(max(1, sizes.num_in if transposed else sizes.num_out)))


@functools.cache
def card_of(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and compute capability: none of AMD's GPUs, which number theirs otherwise."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor) if torch.version.hip is None else (0, 0)
    return properties.multi_processor_count, capability


def rows_are_aligned(*operands: tuple[torch.Tensor, int]) -> bool:
    """Whether the rows of all operands, given with the numbers from one to the next, start at multiples of 16 bytes."""
    return not any(t.data_ptr() % 16 or stride * t.element_size() % 16 for t, stride in operands)


class ConvSpec:
    """The forward or input gradient of one configuration, for operands like these: dtypes and strides are taken.

    ``bias`` and ``residual`` are None where there is none; ``index64`` asks for 64-bit addresses on every map. ``out``
    is the dtype of the result, by default that of x; with ``rescale`` it is made of the sums, see `kernels.rescaled`.
    """

    def __init__(
        self,
        config: ConvConfig,
        problem: ProblemSize,
        x: torch.Tensor,
        weight: torch.Tensor,
        transposed: bool,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
        index64: bool = False,
        out: torch.dtype | None = None,
        rescale: bool = False,
    ) -> None:
        self._config, self._work, self._transposed = config, problem, transposed
        self._index64, self._activation = index64, None if epilogue is None else epilogue.scalar
        self._stride_x = x.stride(0)
        self._weight = (weight.numel(), weight.shape[1] * weight.shape[2])
        # a copy has the axes exchanged: the input gradient reads it as a forward does, a forward reads it transposed
        self._weight_c = weight.shape[1] * problem.groups if config.weight_copy else weight.shape[2]
        self._out, self._rescale = out or problem.dtype, rescale
        self._bias, self._residual = bias is not None, residual is not None
        self._more = tuple(x.dtype if t is None else t.dtype for t in (bias, residual))
        self._memo = functools.cache(self._kernel)

    def bind(self, kernel_map: KernelMap) -> Step | Launch:
        """What runs over this map: called with (x, weight, out, bias, residual), any tensor in the place of none."""
        config, problem = self._config, self._work
        schedule = schedule_of(kernel_map, config.block_m, self._transposed, config.tap_groups, config.morton_runs)
        slots = schedule.slots
        rows_in, rows_out = kernel_map.num_in, kernel_map.num_out
        if self._transposed:
            rows_in, rows_out = rows_out, rows_in
        c_out = problem.group_out * problem.groups
        num_slots = schedule.num_slots
        written = (rows_out if slots is None else max(rows_out, num_slots)) * c_out
        farthest = max(rows_in * self._stride_x, written, schedule.neighbors.numel(), self._weight[0])
        index64 = self._index64 or farthest >= INT32_OFFSETS
        programs = -(-problem.pack * problem.group_out // config.block_n) * -(-problem.groups // problem.pack)
        program, strides = self._memo(slots is not None, index64)
        sums = Launch(program, schedule.num_tiles * programs, schedule.fixed, strides)
        exchange = problem.groups if config.weight_copy else 0
        if slots is None:
            return Step(sums, None, exchange=exchange) if exchange else sums
        combine = self._combination(slots.shape[0])
        block_m, block_n = combine.constants["BLOCK_M"], combine.constants["BLOCK_N"]
        programs = -(-rows_out // block_m) * -(-c_out // block_n)
        return Step(sums, Launch(combine, programs, Fixed((slots,), (rows_out,))), (num_slots, c_out), exchange)

    def _kernel(self, to_slots: bool, index64: bool) -> tuple[Program, tuple[int, ...]]:
        """The kernel that writes the result, or ``to_slots`` the sums of groups of taps; and the strides it takes."""
        config, problem = self._config, self._work
        weight_k, weight_c = self._weight[1], self._weight_c
        unit = unit_of(problem, self._stride_x, weight_k, weight_c)
        strides = (self._stride_x // unit, weight_k // unit, weight_c // unit)
        constants = {
            **problem_constants(problem, unit, index64),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.stages,
            "TRANSPOSED": self._transposed != config.weight_copy,
            "HAS_BIAS": self._bias and not to_slots,
            "HAS_RESIDUAL": self._residual and not to_slots,
            "ACTIVATION": None if to_slots else self._activation,
            "TO_SLOTS": to_slots,
            "RESCALE": self._rescale,
        }
        out = torch.float32 if to_slots else self._out
        slots = 16  # their number is a multiple of it
        types = (problem.dtype, problem.dtype, out, *self._more, *(I32,) * 6, slots, int, *map(specialized, strides))
        kernel, sizes = kernel_named("conv_kernel", config.kernels), (config.warps, config.stages)
        if config.gluon:
            constants["TMA_WEIGHTS"] = config.tma_weights
        if not config.tma_weights:
            return program_of(kernel, types, tuple(constants.items()), *sizes), strides
        matrix = (self._weight[0] // weight_c, weight_c)
        block = (config.block_n, config.block_k) if constants["TRANSPOSED"] else (config.block_k, config.block_n)
        return TmaProgram(kernel, types, constants, *sizes, matrix, weight_c, block), strides

    def _combination(self, num_groups: int) -> Program:
        """The kernel that adds the sums of groups of taps."""
        problem = self._work
        c_out = problem.group_out * problem.groups
        constants = {
            "NUM_GROUPS": num_groups,
            "C_OUT": c_out,
            "HAS_BIAS": self._bias,
            "HAS_RESIDUAL": self._residual,
            "ACTIVATION": self._activation,
            "BLOCK_M": 16,
            "BLOCK_N": min(128, power_of_2(c_out)),
        }
        types = (torch.float32, problem.dtype, *self._more, I32, int)
        return program_of(kernel_named("combine_kernel", "kernels"), types, tuple(constants.items()), 4, 3)


#: numbers of a weight gradient that a program of its reduction adds
REDUCED = 256


def tiles_of(config: WeightGradConfig, problem: ProblemSize) -> int:
    """Tiles of the weight gradient of a tap, each a program's."""
    packs = -(-problem.groups // problem.pack)
    blocks_i = -(-problem.pack * problem.group_in // config.block_i)
    return packs * blocks_i * -(-problem.pack * problem.group_out // config.block_o)


def max_jobs(config: WeightGradConfig, problem: ProblemSize) -> int:
    """Jobs that all taps share, at most: as many as fill the GPU, and whose partial sums fit `PARTIAL_BYTES`."""
    size = problem.group_in * problem.group_out * problem.groups
    return min(PARTIAL_BYTES // (4 * size), config.programs // tiles_of(config, problem))


class WeightGradSpec:
    """The weight gradient of one configuration, for operands like these: the jobs' sums, then their reduction."""

    def __init__(
        self, config: WeightGradConfig, problem: ProblemSize, x: torch.Tensor, grad_out: torch.Tensor, num_taps: int
    ) -> None:
        self._config, self._work, self._num_taps = config, problem, num_taps
        self._strides = (x.stride(0), grad_out.stride(0))
        self._size = problem.group_in * problem.group_out * problem.groups
        self._tiles = tiles_of(config, problem)
        self._max_jobs = max_jobs(config, problem)
        self._memo = functools.cache(self._kernel)

    def bind(self, kernel_map: KernelMap) -> Step | Launch:
        """What runs over this map: called with (x, grad_out, out)."""
        jobs = jobs_of(kernel_map, self._max_jobs)
        stride_x, stride_grad = self._strides
        index64 = max(kernel_map.num_in * stride_x, kernel_map.num_out * stride_grad) >= INT32_OFFSETS
        program, strides = self._memo(jobs.one_each, index64)
        in_rows, out_rows = (
            kernel_map.half_pairs[:2] if kernel_map.is_halved else (kernel_map.in_rows, kernel_map.out_rows)
        )
        sums = Launch(program, jobs.count * self._tiles, jobs.fixed(in_rows, out_rows), strides)
        if jobs.one_each:
            return sums
        reduce = Launch(
            self._reduction(),
            -(-self._size // REDUCED) * self._num_taps,
            Fixed((jobs.tap_jobs,), (self._size,)),
        )
        return Step(sums, reduce, (jobs.count, self._size))

    def _kernel(self, direct: bool, index64: bool) -> tuple[Program, tuple[int, ...]]:
        """The kernel of the sums, and the strides that it takes."""
        config, problem = self._config, self._work
        unit = unit_of(problem, *self._strides)
        strides = tuple(stride // unit for stride in self._strides)
        constants = {
            **problem_constants(problem, unit, index64),
            "BLOCK_I": config.block_i,
            "BLOCK_O": config.block_o,
            "BLOCK_P": config.block_p,
            "STAGES": config.stages,
        }
        types = (problem.dtype, problem.dtype, problem.dtype if direct else torch.float32, I32, I32, I64, I64, I32)
        kernel = kernel_named("weight_grad_kernel", config.kernels)
        return program_of(
            kernel, (*types, *map(specialized, strides)), tuple(constants.items()), config.warps, config.stages
        ), strides

    def _reduction(self) -> Program:
        """The kernel that adds the sums of a tap's jobs."""
        types = (torch.float32, self._work.dtype, I32, specialized(self._size))
        constants = {"BLOCK": REDUCED}
        return program_of(kernel_named("reduce_jobs_kernel", "kernels"), types, tuple(constants.items()), 4, 3)


class Step:
    """Launches over one map: ``sums`` writes the result, or fp32 partial sums that ``last`` then adds.

    The first two tensors of a call are operands of the sums, the third is the result, and the others (bias and
    residual; any tensor for none) are for whichever launch writes it. ``exchange``: groups of a weight to copy first.
    """

    __slots__ = ("_exchange", "_last", "_partial_shape", "_sums")

    def __init__(
        self, sums: Launch, last: Launch | None, partial_shape: tuple[int, int] = (0, 0), exchange: int = 0
    ) -> None:
        self._sums, self._last = sums, last
        self._partial_shape, self._exchange = partial_shape, exchange

    def compile(self) -> None:
        """Compile what this step launches without running it."""
        self._sums.compile()
        if self._last is not None:
            self._last.compile()

    def __call__(self, x: torch.Tensor, other: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> None:
        if self._exchange:
            other = swap_channels(other, self._exchange).contiguous()
        if self._last is None:
            self._sums(x, other, out, *more)
            return
        partial = scratch(*self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, other, partial, *more)
        self._last(partial, out, *more)


class TmaProgram(Program):
    """A `Program` of a Gluon kernel whose second argument describes a matrix.

    It is called as any program is, with the matrix or its address. ``shape`` is the matrix's (rows, columns),
    ``stride`` the numbers from one row to the next, ``block`` the tile that one copy brings.
    """

    def __init__(
        self,
        kernel: Any,
        types: Sequence[Any],
        constants: dict[str, Any],
        warps: int,
        stages: int,
        shape: tuple[int, int],
        stride: int,
        block: tuple[int, int],
    ) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # Triton is loaded where it is used

        from sparseconv.backends.triton_implicit_gemm.gluon import shared_layout

        layout = shared_layout(block[1], 16 // types[1].itemsize)

        @functools.lru_cache(maxsize=64)  # an optimizer leaves a weight where it is
        def describe(address: int) -> Any:
            return TensorDescriptor(_Place(address, types[1]), list(shape), [stride, 1], list(block), layout)

        self._describe = describe
        super().__init__(kernel, (types[0], describe(0), *types[2:]), constants, warps, stages)

    def start(self, device_index: int) -> Callable[[int, int, tuple], None]:
        """What launches it on a device: called with both sides of the grid and the arguments before the constants."""
        start, describe = super().start(device_index), self._describe

        def described(x: int, y: int, arguments: tuple) -> None:
            start(x, y, (arguments[0], describe(arguments[1]), *arguments[2:]))

        return described

    def through_triton(self, grid: int, arguments: tuple[Any, ...]) -> None:
        """Launch as Triton does, which looks at every argument."""
        super().through_triton(grid, (arguments[0], self._describe(arguments[1].data_ptr()), *arguments[2:]))


class _Place(NamedTuple):
    """What a descriptor asks of the tensor that it describes."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
