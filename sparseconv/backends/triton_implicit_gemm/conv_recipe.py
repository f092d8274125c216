"""The recipe of a forward or an input gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparseconv.backends.triton_implicit_gemm.bulk import BulkProgram
from sparseconv.backends.triton_implicit_gemm.config import ConvConfig, Work, power_of_two
from sparseconv.backends.triton_implicit_gemm.recipe import (
    I32,
    NARROW,
    Kept,
    compiled,
    kernel_named,
    operands_of,
    shown,
    unit_of,
)
from sparseconv.backends.triton_implicit_gemm.steps import Chain, Part, Step
from sparseconv.geometry.gpu.tiles.schedule import Schedule
from sparseconv.geometry.gpu.work_lists import schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.program import Fixed, Launch, Program

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue


class ConvRecipe:
    """The forward or input gradient of one configuration, for operands like these: dtypes and strides are taken.

    ``bias`` and ``residual`` are None where there is none; ``wide`` asks for 64-bit addresses on every map. ``out`` is
    the dtype of the result, by default that of x; with ``rescale`` it is made of int32 sums, see `kernels.rescaled`.
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
        out: torch.dtype | None = None,
        rescale: bool = False,
    ) -> None:
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
        self._out, self._rescale = out or work.dtype, rescale
        self._bias, self._residual = bias is not None, residual is not None
        self._more = tuple(x.dtype if t is None else t.dtype for t in (bias, residual))
        self._kept = Kept()

    def ahead(self, kernel_map: KernelMap, device: torch.device) -> None:
        """Start to compile what `bind` will launch over a map like this one."""
        groups = min(self._config.split, kernel_map.num_taps)
        parts = self._parts(groups)
        for part in parts:
            self._kept(self._program, part, self._wide)[0].ahead(device)
        if parts[0].to_slots:
            self._kept(self._combination, groups).ahead(device)

    def prepare(self, kernel_map: KernelMap) -> Schedule:
        """The schedule that `bind` needs, kept with the map."""
        config = self._config
        return schedule_of(kernel_map, config.block_m, self._transposed, config.split, config.chunked, config.in_order)

    def bind(self, kernel_map: KernelMap) -> Step | Chain | Launch:
        """What runs over this map: called with (x, weight, out, bias, residual), any tensor in the place of none."""
        config, work = self._config, self._work
        schedule = self.prepare(kernel_map)
        slots = schedule.slots
        groups = 1 if slots is None else slots.shape[0]
        rows_in, rows_out = kernel_map.num_in, kernel_map.num_out
        if self._transposed:
            rows_in, rows_out = rows_out, rows_in
        parts = self._parts(groups)
        turn = work if parts[0].ends else self._turn
        c_out = turn.group_out * turn.groups
        num_slots = schedule.num_slots
        written = max(rows_out * work.group_out * work.groups, num_slots * c_out if parts[0].to_slots else 0)
        farthest = max(rows_in * self._stride_x, written, schedule.table_size, self._weight[0])
        wide = self._wide or farthest >= NARROW
        tiles = schedule.num_tiles // len(parts)
        programs = tiles * -(-turn.pack * turn.group_out // config.block_n) * -(-work.groups // work.pack)
        launches = []
        for part, fixed in zip(parts, schedule.links if len(parts) > 1 else (schedule.fixed,)):
            program, strides = self._kept(self._program, part, wide)
            launches.append(Launch(program, programs, fixed, strides))
        if len(launches) > 1:
            return Chain(launches, (rows_out, c_out), self._transposed, (self._bias, self._residual))
        exchange = work.groups if config.weight_copy else 0
        if slots is None:
            return Step(launches[0], None, exchange=exchange) if exchange else launches[0]
        combine = self._kept(self._combination, groups)
        block_m, block_n = combine.constants["BLOCK_M"], combine.constants["BLOCK_N"]
        programs = -(-rows_out // block_m) * -(-c_out // block_n)
        last = Launch(combine, programs, Fixed((slots,), (rows_out,)))
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
        unit = unit_of(work, self._stride_x, weight_k, weight_c)
        strides = (self._stride_x // unit, weight_k // unit, weight_c // unit)
        turn = work if part == Part() else self._turn
        whole_row, row = work.group_out * work.groups, turn.group_out * turn.groups
        constants = {
            **operands_of(turn, unit, wide),
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
            "RESCALE": self._rescale,
        }
        out, more = self._out if part.ends else torch.float32, self._more
        if part.follows:
            more = (work.dtype, torch.float32)
        types = (work.dtype, work.dtype, out, *more, *(I32,) * 6, 16, int, *map(shown, strides))  # 16: slots
        kernel, sizes = kernel_named("conv_kernel", config.kernels), (config.warps, config.stages)
        if config.gluon:
            constants["BULK"] = config.bulk
        if not config.bulk:
            return compiled(kernel, types, constants, *sizes), strides
        rows, columns = self._weight[0] // weight_c, weight_c
        matrix = (rows - whole_row + row, columns) if constants["TRANSPOSED"] else (rows, columns - whole_row + row)
        block = (config.block_n, config.block_k) if constants["TRANSPOSED"] else (config.block_k, config.block_n)
        return BulkProgram(kernel, types, constants, *sizes, matrix, weight_c, block), strides

    def _combination(self, num_groups: int) -> Program:
        """The kernel that adds the sums of groups of taps."""
        work = self._work
        c_out = work.group_out * work.groups
        constants = {
            "NUM_GROUPS": num_groups,
            "C_OUT": c_out,
            "HAS_BIAS": self._bias,
            "HAS_RESIDUAL": self._residual,
            "ACTIVATION": self._activation,
            "BLOCK_M": 16,
            "BLOCK_N": min(128, power_of_two(c_out)),
        }
        types = (torch.float32, work.dtype, *self._more, I32, int)
        return compiled(kernel_named("combine_kernel", "kernels"), types, constants, 4, 3)
