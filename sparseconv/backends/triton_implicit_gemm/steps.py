"""What runs for one configuration: a recipe knows all but the map; a step is a recipe over one map.

A recipe holds compiled kernels and is kept for every map of about its size; a step adds addresses and sizes, so that
the first use of a layer on a new map costs little more than any other.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparseconv.backends.triton_implicit_gemm.bulk import BulkProgram
from sparseconv.backends.triton_implicit_gemm.config import (
    PARTIAL_BYTES,
    ConvConfig,
    WeightGradConfig,
    Work,
    power_of_two,
)
from sparseconv.geometry.gpu.jobs.jobs import JOB_QUANTUM, most_jobs
from sparseconv.geometry.gpu.tiles.schedule import Schedule
from sparseconv.geometry.gpu.work_lists import jobs_of, schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.program import Fixed, Launch, Program, program_of
from sparseconv.gpu.streams import scratch
from sparseconv.torch_private import allows_tf32

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue

#: offsets from a pointer that a kernel may compute in 32 bits
NARROW = 2**31
#: numbers of a weight gradient that a program of its reduction adds
REDUCED = 256
_I32, _I64 = torch.int32, torch.int64


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
            other = _exchanged(other, self._exchange)
        if self._last is None:
            self._sums(x, other, out, *more)
            return
        partial = scratch(*self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, other, partial, *more)
        self._last(partial, out, *more)


class Part(NamedTuple):
    """What one launch of a forward or input gradient has to do with the others."""

    #: fp32 sums of groups of taps side by side, for a launch behind it to add
    to_slots: bool = False
    #: fp32 sums, for the launch of the next group of taps to add to
    leads: bool = False
    #: it adds to the sums of the launch before it
    follows: bool = False

    @property
    def begins(self) -> bool:
        """Whether it adds bias and residual."""
        return not self.to_slots and not self.follows

    @property
    def ends(self) -> bool:
        """Whether it writes the result."""
        return not self.to_slots and not self.leads


class Chain:
    """Launches for groups of taps, one after another: each adds to the sums before it, the last writes the result.

    The first begins with bias and residual. Some output channels at a time: ``sums_shape`` is (N_out, how many), and
    they are the weight's last axis, ``transposed`` its middle one; ``more`` says which of bias and residual there are.
    """

    __slots__ = ("_links", "_more", "_sums_shape", "_transposed")

    def __init__(
        self, links: Sequence[Launch], sums_shape: tuple[int, int], transposed: bool, more: tuple[bool, ...]
    ) -> None:
        self._links, self._sums_shape, self._more = links, sums_shape, more
        self._transposed = transposed

    def compile(self) -> None:
        """Compile what this step launches without running it."""
        for link in self._links:
            link.compile()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> None:
        sums = torch.empty(self._sums_shape, dtype=torch.float32, device=x.device)
        width = self._sums_shape[1]
        first, *between, last = self._links
        for start in range(0, out.shape[1], width):
            part = slice(start, start + width)
            mine = weight[:, part] if self._transposed else weight[..., part]
            first(x, mine, sums, *(t[..., part] if there else t for t, there in zip(more, self._more)))
            for link in between:
                link(x, mine, sums, x, sums)
            last(x, mine, out[:, part], x, sums)


class ConvRecipe:
    """The forward or input gradient of one configuration, for operands like these: dtypes and strides are taken.

    ``bias`` and ``residual`` are None where there is none; ``wide`` asks for 64-bit addresses on every map.
    """

    def __init__(
        self,
        config: ConvConfig,
        work: Work,
        x: torch.Tensor,
        weight: torch.Tensor,
        transposed: bool,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
        wide: bool = False,
    ) -> None:
        if config.apart and config.split > 1:
            raise ValueError(f"warps that copy and multiply apart take all taps in one launch; got {config}")
        several = config.turns > 1 and (work.groups > 1 or (config.gluon and not config.bulk))
        if several or (config.turns and config.weight_copy):
            raise ValueError(
                "a chain reads the weight as it lies, and in several turns that of one group, by plain Triton or "
                f"the copy engine; got {config} and {work.groups} groups"
            )
        self._config, self._work, self._transposed = config, work, transposed
        #: what one turn computes, where taps are split at all
        self._turn = replace(work, group_out=work.group_out // max(1, config.turns))
        self._wide, self._activation = wide, None if epilogue is None else epilogue.scalar
        self._stride_x = x.stride(0)
        self._weight = (weight.numel(), weight.shape[1] * weight.shape[2])
        # a copy has the axes exchanged: the input gradient reads it as a forward does, a forward reads it transposed
        self._weight_c = weight.shape[1] * work.groups if config.weight_copy else weight.shape[2]
        self._bias, self._residual = bias is not None, residual is not None
        self._more = tuple(x.dtype if t is None else t.dtype for t in (bias, residual))
        self._kept = _Kept()

    def ahead(self, kernel_map: KernelMap, device: torch.device) -> None:
        """Start to compile what `bind` will launch over a map like this one."""
        for part in self._parts(min(self._config.split, kernel_map.num_taps)):
            self._kept(self._program, part, self._wide)[0].ahead(device)

    def prepare(self, kernel_map: KernelMap) -> Schedule:
        """The schedule that `bind` needs, kept with the map."""
        config = self._config
        return schedule_of(kernel_map, config.block_m, self._transposed, config.split, config.chunked, config.in_order)

    def bind(self, kernel_map: KernelMap) -> Step | Chain | Launch:
        """What runs over this map: called with (x, weight, out, bias, residual), any tensor in the place of none."""
        config, work = self._config, self._work
        schedule = self.prepare(kernel_map)
        groups = 1 if schedule.slots is None else schedule.slots.shape[0]
        rows_in, rows_out = kernel_map.num_in, kernel_map.num_out
        if self._transposed:
            rows_in, rows_out = rows_out, rows_in
        parts = self._parts(groups)
        turn = work if parts[0].ends else self._turn
        c_out = turn.group_out * turn.groups
        num_slots = schedule.out_rows.shape[0]
        written = max(rows_out * work.group_out * work.groups, num_slots * c_out if parts[0].to_slots else 0)
        farthest = max(rows_in * self._stride_x, written, schedule.neighbors.numel(), self._weight[0])
        wide = self._wide or farthest >= NARROW
        tiles = schedule.num_tiles // len(parts)
        programs = tiles * -(-turn.pack * turn.group_out // config.block_n) * -(-work.groups // work.pack)
        if config.apart:
            programs = min(programs, work.processors)
        launches = []
        for part, fixed in zip(parts, schedule.links if len(parts) > 1 else (schedule.fixed,)):
            program, strides = self._kept(self._program, part, wide)
            launches.append(Launch(program, programs, fixed, strides))
        if len(launches) > 1:
            return Chain(launches, (rows_out, c_out), self._transposed, (self._bias, self._residual))
        exchange = work.groups if config.weight_copy else 0
        if schedule.slots is None:
            return Step(launches[0], None, exchange=exchange) if exchange else launches[0]
        block_m, block_n = 16, min(128, power_of_two(c_out))
        programs = -(-rows_out // block_m) * -(-c_out // block_n)
        combine = self._kept(self._combination, groups, block_m, block_n)
        last = Launch(combine, programs, Fixed((schedule.slots,), (rows_out,)))
        return Step(launches[0], last, (num_slots, c_out), exchange)

    def _parts(self, groups: int) -> list[Part]:
        """The launches for so many groups of taps, but the one that adds the sums of all."""
        if groups == 1:
            return [Part()]
        if not self._config.turns:
            return [Part(to_slots=True)]
        return [Part(leads=group < groups - 1, follows=group > 0) for group in range(groups)]

    def _program(self, part: Part, wide: bool) -> tuple[Program, tuple[int, ...]]:
        """The kernel of one launch, and the strides that it takes."""
        config, work = self._config, self._work
        weight_k, weight_c = self._weight[1], self._weight_c
        unit = _unit(work, self._stride_x, weight_k, weight_c)
        strides = (self._stride_x // unit, weight_k // unit, weight_c // unit)
        turn = work if part == Part() else self._turn
        whole_row, row = work.group_out * work.groups, turn.group_out * turn.groups
        constants = {
            **_operands(turn, unit, wide),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.stages,
            "TRANSPOSED": self._transposed != config.weight_copy,
            "HAS_BIAS": self._bias and part.begins,
            "HAS_RESIDUAL": part.follows or (self._residual and part.begins),
            "ACTIVATION": self._activation if part.ends else None,
            "ROW": whole_row,
            "TO_SLOTS": part.to_slots,
            "LEADS": part.leads,
            "FOLLOWS": part.follows,
        }
        out, more = work.dtype if part.ends else torch.float32, self._more
        if part.follows:
            more = (work.dtype, torch.float32)
        types = (work.dtype, work.dtype, out, *more, *(_I32,) * 6, 16, int, *map(_shown, strides))  # 16: slots
        kernel, sizes = _kernel("conv_kernel", config.kernels), (config.warps, config.stages)
        if config.kernels == "gluon_kernels":
            constants["BULK"] = config.bulk
        if not config.bulk:
            return _program(kernel, types, constants, *sizes), strides
        rows, columns = self._weight[0] // weight_c, weight_c
        matrix = (rows - whole_row + row, columns) if constants["TRANSPOSED"] else (rows, columns - whole_row + row)
        block = (config.block_n, config.block_k) if constants["TRANSPOSED"] else (config.block_k, config.block_n)
        return BulkProgram(kernel, types, constants, *sizes, matrix, weight_c, block), strides

    def _combination(self, num_groups: int, block_m: int, block_n: int) -> Program:
        """The kernel that adds the sums of groups of taps."""
        work = self._work
        constants = {
            "NUM_GROUPS": num_groups,
            "C_OUT": work.group_out * work.groups,
            "HAS_BIAS": self._bias,
            "HAS_RESIDUAL": self._residual,
            "ACTIVATION": self._activation,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        }
        types = (torch.float32, work.dtype, *self._more, _I32, int)
        return _program(_kernel("combine_kernel", "kernels"), types, constants, 4, 3)


class WeightGradRecipe:
    """The weight gradient of one configuration, for operands like these: the jobs' sums, then their reduction."""

    def __init__(
        self, config: WeightGradConfig, work: Work, x: torch.Tensor, grad_out: torch.Tensor, num_taps: int
    ) -> None:
        self._config, self._work, self._num_taps = config, work, num_taps
        self._strides = (x.stride(0), grad_out.stride(0))
        self._size = work.group_in * work.group_out * work.groups
        packs = -(-work.groups // work.pack)
        blocks_i = -(-work.pack * work.group_in // config.block_i)
        self._tiles = packs * blocks_i * -(-work.pack * work.group_out // config.block_o)
        self._max_jobs = min(PARTIAL_BYTES // (4 * self._size), config.programs // self._tiles)
        self._kept = _Kept()

    def ahead(self, kernel_map: KernelMap, device: torch.device) -> None:
        """Start to compile what `bind` will launch over a map like this one."""
        from sparseconv.geometry.gpu.jobs.kernels import jobs_ahead  # Triton is loaded where it is used

        taps = kernel_map.num_taps
        direct = most_jobs(taps, kernel_map.num_pairs, self._max_jobs, JOB_QUANTUM) == taps
        self._kept(self._program, direct, False)[0].ahead(device)
        jobs_ahead(taps, device, kernel_map.is_halved)
        if not direct:
            self._kept(self._reduction).ahead(device)

    def prepare(self, kernel_map: KernelMap) -> None:
        """Nothing: jobs are cut by the number of pairs."""

    def bind(self, kernel_map: KernelMap) -> Step | Launch:
        """What runs over this map: called with (x, grad_out, out)."""
        jobs = jobs_of(kernel_map, self._max_jobs)
        stride_x, stride_grad = self._strides
        wide = max(kernel_map.num_in * stride_x, kernel_map.num_out * stride_grad) >= NARROW
        program, strides = self._kept(self._program, jobs.one_each, wide)
        in_rows, out_rows = (
            kernel_map.half_pairs[:2] if kernel_map.is_halved else (kernel_map.in_rows, kernel_map.out_rows)
        )
        fixed = Fixed((in_rows, out_rows, jobs.begin, jobs.end, jobs.order))
        sums = Launch(program, jobs.count * self._tiles, fixed, strides)
        if jobs.one_each:
            return sums
        reduce = Launch(
            self._kept(self._reduction), -(-self._size // REDUCED) * self._num_taps, Fixed((jobs.tap_jobs,))
        )
        return Step(sums, reduce, (jobs.count, self._size))

    def _program(self, direct: bool, wide: bool) -> tuple[Program, tuple[int, ...]]:
        """The kernel of the sums, and the strides that it takes."""
        config, work = self._config, self._work
        unit = _unit(work, *self._strides)
        strides = tuple(stride // unit for stride in self._strides)
        constants = {
            **_operands(work, unit, wide),
            "BLOCK_I": config.block_i,
            "BLOCK_O": config.block_o,
            "BLOCK_P": config.block_p,
            "STAGES": config.stages,
        }
        types = (work.dtype, work.dtype, work.dtype if direct else torch.float32, _I32, _I32, _I64, _I64, _I32)
        kernel = _kernel("weight_grad_kernel", "gluon_kernels" if config.gluon else "kernels")
        return _program(kernel, (*types, *map(_shown, strides)), constants, config.warps, config.stages), strides

    def _reduction(self) -> Program:
        """The kernel that adds the sums of a tap's jobs."""
        types = (torch.float32, self._work.dtype, _I32)
        return _program(_kernel("reduce_jobs_kernel", "kernels"), types, {"SIZE": self._size, "BLOCK": REDUCED}, 4, 3)


def _program(kernel: Any, types: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int) -> Program:
    return program_of(kernel, types, tuple(constants.items()), warps, stages)


class _Kept(dict[tuple[Any, ...], Any]):
    """What a recipe has made of its arguments: the kernels for maps of different kinds."""

    def __call__(self, make: Any, *args: Any) -> Any:
        key = (make.__name__, *args)
        found = self.get(key)
        if found is None:
            found = self[key] = make(*args)
        return found


def _shown(stride: int) -> Any:
    """A stride as a kernel is compiled for it: the compiler knows whether it is a multiple of 16."""
    return 16 if stride % 16 == 0 else int


def _operands(work: Work, unit: int, wide: bool) -> dict[str, Any]:
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


def _exchanged(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The weight (K, C_in/G, C_out) laid out as (K, C_out/G, C_in): each group's block transposed."""
    taps, group_in, c_out = weight.shape
    blocks = weight.view(taps, group_in, groups, c_out // groups).permute(0, 3, 2, 1)
    return blocks.reshape(taps, c_out // groups, groups * group_in).contiguous()


def _unit(work: Work, *strides: int) -> int:
    """The factor of every stride that makes 16 bytes, where it is one; else 1."""
    unit = 16 // work.dtype.itemsize
    return unit if work.aligned and not any(stride % unit for stride in strides) else 1


#: torch.backends.cuda.matmul.allow_tf32 without its look for a name, which takes a microsecond
_allows_tf32 = allows_tf32


def precision_of(dtype: torch.dtype) -> str:
    """How products of fp32 numbers are taken, by torch's own switch; halves have one way only."""
    return "tf32" if dtype != torch.float32 or _allows_tf32() else "ieee"


@functools.cache
def _kernel(name: str, module: str) -> Any:
    return getattr(importlib.import_module(f"sparseconv.backends.triton_implicit_gemm.{module}"), name)


@functools.cache
def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1 when they were first imported)."""
    try:
        return type(_kernel("conv_kernel", "kernels")).__name__ == "InterpretedFunction"
    except ImportError:
        return False
