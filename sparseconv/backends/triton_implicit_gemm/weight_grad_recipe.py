"""The recipe of a weight gradient."""

from __future__ import annotations

import torch

from sparseconv.backends.triton_implicit_gemm.config import PARTIAL_BYTES, WeightGradConfig, Work
from sparseconv.backends.triton_implicit_gemm.recipe import (
    I32,
    I64,
    NARROW,
    Kept,
    compiled,
    kernel_named,
    operands_of,
    shown,
    unit_of,
)
from sparseconv.backends.triton_implicit_gemm.steps import Step
from sparseconv.geometry.gpu.work_lists import jobs_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.program import Fixed, Launch, Program

#: numbers of a weight gradient that a program of its reduction adds
REDUCED = 256


def tiles_of(config: WeightGradConfig, work: Work) -> int:
    """Tiles of the weight gradient of a tap, each a program's."""
    packs = -(-work.groups // work.pack)
    blocks_i = -(-work.pack * work.group_in // config.block_i)
    return packs * blocks_i * -(-work.pack * work.group_out // config.block_o)


def max_jobs(config: WeightGradConfig, work: Work) -> int:
    """Jobs that all taps share, at most: as many as fill the GPU, and whose partial sums fit `PARTIAL_BYTES`."""
    size = work.group_in * work.group_out * work.groups
    return min(PARTIAL_BYTES // (4 * size), config.programs // tiles_of(config, work))


class WeightGradRecipe:
    """The weight gradient of one configuration, for operands like these: the jobs' sums, then their reduction."""

    def __init__(
        self, config: WeightGradConfig, work: Work, x: torch.Tensor, grad_out: torch.Tensor, num_taps: int
    ) -> None:
        self._config, self._work, self._num_taps = config, work, num_taps
        self._strides = (x.stride(0), grad_out.stride(0))
        self._size = work.group_in * work.group_out * work.groups
        self._tiles = tiles_of(config, work)
        self._max_jobs = max_jobs(config, work)
        self._kept = Kept()

    def bind(self, kernel_map: KernelMap) -> Step | Launch:
        """What runs over this map: called with (x, grad_out, out)."""
        jobs = jobs_of(kernel_map, self._max_jobs)
        stride_x, stride_grad = self._strides
        wide = max(kernel_map.num_in * stride_x, kernel_map.num_out * stride_grad) >= NARROW
        program, strides = self._kept(self._program, jobs.one_each, wide)
        in_rows, out_rows = (
            kernel_map.half_pairs[:2] if kernel_map.is_halved else (kernel_map.in_rows, kernel_map.out_rows)
        )
        sums = Launch(program, jobs.count * self._tiles, jobs.fixed(in_rows, out_rows), strides)
        if jobs.one_each:
            return sums
        reduce = Launch(
            self._kept(self._reduction),
            -(-self._size // REDUCED) * self._num_taps,
            Fixed((jobs.tap_jobs,), (self._size,)),
        )
        return Step(sums, reduce, (jobs.count, self._size))

    def _program(self, direct: bool, wide: bool) -> tuple[Program, tuple[int, ...]]:
        """The kernel of the sums, and the strides that it takes."""
        config, work = self._config, self._work
        unit = unit_of(work, *self._strides)
        strides = tuple(stride // unit for stride in self._strides)
        constants = {
            **operands_of(work, unit, wide),
            "BLOCK_I": config.block_i,
            "BLOCK_O": config.block_o,
            "BLOCK_P": config.block_p,
            "STAGES": config.stages,
        }
        types = (work.dtype, work.dtype, work.dtype if direct else torch.float32, I32, I32, I64, I64, I32)
        kernel = kernel_named("weight_grad_kernel", config.kernels)
        return compiled(kernel, (*types, *map(shown, strides)), constants, config.warps, config.stages), strides

    def _reduction(self) -> Program:
        """The kernel that adds the sums of a tap's jobs."""
        types = (torch.float32, self._work.dtype, I32, shown(self._size))
        constants = {"BLOCK": REDUCED}
        return compiled(kernel_named("reduce_jobs_kernel", "kernels"), types, constants, 4, 3)
