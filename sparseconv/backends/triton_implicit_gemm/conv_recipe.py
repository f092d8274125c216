"""The recipe of a forward or an input gradient."""

from __future__ import annotations

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
from sparseconv.backends.triton_implicit_gemm.steps import Step
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
        self._config, self._work, self._transposed = config, work, transposed
        self._wide, self._activation = wide, None if epilogue is None else epilogue.scalar
        self._stride_x = x.stride(0)
        self._weight = (weight.numel(), weight.shape[1] * weight.shape[2])
        # a copy has the axes exchanged: the input gradient reads it as a forward does, a forward reads it transposed
        self._weight_c = weight.shape[1] * work.groups if config.weight_copy else weight.shape[2]
        self._out, self._rescale = out or work.dtype, rescale
        self._bias, self._residual = bias is not None, residual is not None
        self._more = tuple(x.dtype if t is None else t.dtype for t in (bias, residual))
        self._kept = Kept()

    def bind(self, kernel_map: KernelMap) -> Step | Launch:
        """What runs over this map: called with (x, weight, out, bias, residual), any tensor in the place of none."""
        config, work = self._config, self._work
        schedule = schedule_of(kernel_map, config.block_m, self._transposed, config.split, config.chunked)
        slots = schedule.slots
        rows_in, rows_out = kernel_map.num_in, kernel_map.num_out
        if self._transposed:
            rows_in, rows_out = rows_out, rows_in
        c_out = work.group_out * work.groups
        num_slots = schedule.num_slots
        written = (rows_out if slots is None else max(rows_out, num_slots)) * c_out
        farthest = max(rows_in * self._stride_x, written, schedule.table_size, self._weight[0])
        wide = self._wide or farthest >= NARROW
        programs = -(-work.pack * work.group_out // config.block_n) * -(-work.groups // work.pack)
        program, strides = self._kept(self._program, slots is not None, wide)
        sums = Launch(program, schedule.num_tiles * programs, schedule.fixed, strides)
        exchange = work.groups if config.weight_copy else 0
        if slots is None:
            return Step(sums, None, exchange=exchange) if exchange else sums
        combine = self._kept(self._combination, slots.shape[0])
        block_m, block_n = combine.constants["BLOCK_M"], combine.constants["BLOCK_N"]
        programs = -(-rows_out // block_m) * -(-c_out // block_n)
        return Step(sums, Launch(combine, programs, Fixed((slots,), (rows_out,))), (num_slots, c_out), exchange)

    def _program(self, to_slots: bool, wide: bool) -> tuple[Program, tuple[int, ...]]:
        """The kernel that writes the result, or ``to_slots`` the sums of groups of taps; and the strides it takes."""
        config, work = self._config, self._work
        weight_k, weight_c = self._weight[1], self._weight_c
        unit = unit_of(work, self._stride_x, weight_k, weight_c)
        strides = (self._stride_x // unit, weight_k // unit, weight_c // unit)
        constants = {
            **operands_of(work, unit, wide),
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
        types = (work.dtype, work.dtype, out, *self._more, *(I32,) * 6, 16, int, *map(shown, strides))  # 16: slots
        kernel, sizes = kernel_named("conv_kernel", config.kernels), (config.warps, config.stages)
        if config.gluon:
            constants["BULK"] = config.bulk
        if not config.bulk:
            return compiled(kernel, types, constants, *sizes), strides
        matrix = (self._weight[0] // weight_c, weight_c)
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
