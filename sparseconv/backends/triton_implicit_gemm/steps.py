"""What runs for one configuration: launches in order, and the partial sums that travel between them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sparseconv.backends.triton_implicit_gemm.config import ConvConfig, WeightGradConfig, Work, power_of_two
from sparseconv.backends.triton_implicit_gemm.jobs import jobs_of
from sparseconv.backends.triton_implicit_gemm.launch import Launch
from sparseconv.backends.triton_implicit_gemm.schedule import schedule_of
from sparseconv.geometry.kernel_map import KernelMap

#: offsets from a pointer that a kernel may compute in 32 bits
NARROW = 2**31
#: bytes of fp32 partial sums of a weight gradient: fewer jobs where they would take more
PARTIAL_BYTES = 48 << 20


class ConvStep:
    """The forward or input gradient of one configuration: called with (x, weight, out, bias, residual)."""

    def __init__(
        self,
        config: ConvConfig,
        work: Work,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        out: torch.Tensor,
        has_bias: bool,
        transposed: bool,
        wide: bool = False,
        has_residual: bool = False,
        activation: Any = None,
    ) -> None:
        schedule = schedule_of(kernel_map, config.block_m, transposed, config.split, config.chunked)
        self._groups = work.groups
        self._copy = config.weight_copy
        # a copy has the axes exchanged: the input gradient reads it as a forward does, a forward reads it transposed
        read_transposed = transposed != config.weight_copy
        weight_c = weight.shape[1] * work.groups if self._copy else weight.shape[2]
        weight_k = weight.shape[1] * weight.shape[2]
        num_slots = schedule.out_rows.shape[0]
        self._partial_shape = (num_slots, out.shape[1]) if schedule.slots is not None else None
        written = out.numel() if self._partial_shape is None else num_slots * out.shape[1]
        farthest = max(x.shape[0] * x.stride(0), written, schedule.neighbors.numel(), weight.numel())
        unit = _unit(work, x.stride(0), weight_k, weight_c)
        blocks_n = -(-work.pack * work.group_out // config.block_n)
        packs = -(-work.groups // work.pack)
        self._sums = Launch(
            _kernel(config.kernel, config.gluon),
            config.grid(schedule.num_tiles * packs * blocks_n, work.processors),
            (
                schedule.neighbors,
                schedule.out_rows,
                schedule.tile_counts,
                schedule.tile_rows,
                schedule.tile_taps,
                schedule.tile_order,
                num_slots,
                schedule.tile_rows.shape[1],
                x.stride(0) // unit,
                weight_k // unit,
                weight_c // unit,
            ),
            {
                "UNIT": unit,
                "GROUP_IN": work.group_in,
                "GROUP_OUT": work.group_out,
                "PACK": work.pack,
                "GROUPS": work.groups,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "STAGES": config.stages,
                "TRANSPOSED": read_transposed,
                "HAS_BIAS": has_bias and self._partial_shape is None,
                "HAS_RESIDUAL": has_residual and self._partial_shape is None,
                "ACTIVATION": activation if self._partial_shape is None else None,
                "TO_SLOTS": self._partial_shape is not None,
                "WIDE": wide or farthest >= NARROW,
                "HIDDEN": not interpreted(),
                "PRECISION": precision_of(work.dtype),
            },
            config.warps,
            config.stages,
        )
        if schedule.slots is not None:
            block_m, block_n = 16, min(128, power_of_two(out.shape[1]))
            self._combine = Launch(
                _kernel("combine_kernel", False),
                -(-out.shape[0] // block_m) * -(-out.shape[1] // block_n),
                (schedule.slots, out.shape[0]),
                {
                    "NUM_GROUPS": schedule.slots.shape[0],
                    "C_OUT": out.shape[1],
                    "HAS_BIAS": has_bias,
                    "HAS_RESIDUAL": has_residual,
                    "ACTIVATION": activation,
                    "BLOCK_M": block_m,
                    "BLOCK_N": block_n,
                },
                4,
                3,
            )

    def compile(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> None:
        """Compile what this step launches without running it; ``more`` are bias and residual, any tensor for none."""
        if self._partial_shape is None:
            self._sums.compile(x, weight, out, *more)
            return
        partial = torch.empty(0, dtype=torch.float32, device=x.device)
        self._sums.compile(x, weight, partial, *more)
        self._combine.compile(partial, out, *more)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> None:
        if self._copy:
            weight = _exchanged(weight, self._groups)
        if self._partial_shape is None:
            self._sums(x, weight, out, *more)
            return
        partial = torch.empty(self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, weight, partial, *more)
        self._combine(partial, out, *more)


def _exchanged(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The weight (K, C_in/G, C_out) laid out as (K, C_out/G, C_in): each group's block transposed."""
    taps, group_in, c_out = weight.shape
    blocks = weight.view(taps, group_in, groups, c_out // groups).permute(0, 3, 2, 1)
    return blocks.reshape(taps, c_out // groups, groups * group_in).contiguous()


class WeightGradStep:
    """The weight gradient of one configuration: the jobs' sums, then their reduction where a tap has several."""

    def __init__(
        self,
        config: WeightGradConfig,
        work: Work,
        kernel_map: KernelMap,
        x: torch.Tensor,
        grad_out: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        size = work.group_in * work.group_out * work.groups
        packs = -(-work.groups // work.pack)
        tiles = (
            packs * -(-work.pack * work.group_in // config.block_i) * -(-work.pack * work.group_out // config.block_o)
        )
        jobs = jobs_of(kernel_map, min(PARTIAL_BYTES // (4 * size), config.programs // tiles))
        wide = max(x.shape[0] * x.stride(0), grad_out.shape[0] * grad_out.stride(0)) >= NARROW
        unit = _unit(work, x.stride(0), grad_out.stride(0))
        self._direct = jobs.one_each
        self._partial_shape = (jobs.count, size)
        self._sums = Launch(
            _kernel("weight_grad_kernel", config.gluon),
            jobs.count * tiles,
            (
                kernel_map.in_rows,
                kernel_map.out_rows,
                jobs.begin,
                jobs.end,
                jobs.order,
                x.stride(0) // unit,
                grad_out.stride(0) // unit,
            ),
            {
                "UNIT": unit,
                "GROUP_IN": work.group_in,
                "GROUP_OUT": work.group_out,
                "PACK": work.pack,
                "GROUPS": work.groups,
                "BLOCK_I": config.block_i,
                "BLOCK_O": config.block_o,
                "BLOCK_P": config.block_p,
                "STAGES": config.stages,
                "WIDE": wide,
                "HIDDEN": not interpreted(),
                "PRECISION": precision_of(work.dtype),
            },
            config.warps,
            config.stages,
        )
        block = 256
        self._reduce = Launch(
            _kernel("reduce_jobs_kernel", False),
            -(-size // block) * out.shape[0],
            (jobs.tap_jobs,),
            {"SIZE": size, "BLOCK": block},
            4,
            3,
        )

    def compile(self, x: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor) -> None:
        """Compile both kernels without running them."""
        if self._direct:
            self._sums.compile(x, grad_out, out)
            return
        partial = torch.empty(0, dtype=torch.float32, device=x.device)
        self._sums.compile(x, grad_out, partial)
        self._reduce.compile(partial, out)

    def __call__(self, x: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor) -> None:
        if self._direct:
            self._sums(x, grad_out, out)
            return
        partial = torch.empty(self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, grad_out, partial)
        self._reduce(partial, out)


def _unit(work: Work, *strides: int) -> int:
    """The factor of every stride that makes 16 bytes, where it is one; else 1."""
    unit = 16 // work.dtype.itemsize
    return unit if work.aligned and not any(stride % unit for stride in strides) else 1


def precision_of(dtype: torch.dtype) -> str:
    """How products of fp32 numbers are taken, by torch's own switch; halves have one way only."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def _kernel(name: str, gluon: bool) -> Any:
    if gluon:
        from sparseconv.backends.triton_implicit_gemm import gluon_kernels, gluon_persistent

        return getattr(gluon_persistent if name.startswith("persistent") else gluon_kernels, name)
    from sparseconv.backends.triton_implicit_gemm import kernels

    return getattr(kernels, name)


@functools.cache
def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1 when they were first imported)."""
    try:
        return type(_kernel("conv_kernel", False)).__name__ == "InterpretedFunction"
    except ImportError:
        return False
