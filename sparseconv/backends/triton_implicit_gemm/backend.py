"""Sparse convolution as one matrix product whose rows are looked up: nothing gathered to memory, nothing scattered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sparseconv.backends.base import Backend, Request, with_dense_rows
from sparseconv.backends.float8 import FLOAT8
from sparseconv.backends.triton_implicit_gemm.config import (
    FLOATING,
    ConvConfig,
    ProblemSize,
    WeightGradConfig,
    autotuned,
    conv_candidates,
    steady_rows,
    weight_grad_candidates,
)
from sparseconv.backends.triton_implicit_gemm.recipe import (
    ConvSpec,
    WeightGradSpec,
    card_of,
    interpreted,
    max_jobs,
    octave,
    problem_size,
    rows_are_aligned,
    tiles_of,
)
from sparseconv.geometry.gpu.lists import JOB_QUANTUM, SLOT_ALIGNMENT, most_jobs
from sparseconv.geometry.gpu.work_lists import schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.cuda_capability import PTX_FROM, precision_of, refusal
from sparseconv.gpu.streams import list_stream, scratch

if TYPE_CHECKING:
    from sparseconv.backends.float8 import Float8Rescale
    from sparseconv.backends.integers import Rescale
    from sparseconv.pointwise import Epilogue

logger = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, FLOAT8)


class TritonImplicitGemm(Backend):
    """Output-stationary tiles over rows sorted by their tap masks; each tile visits its live taps only.

    The input gradient is the same kernel over the reversed edges with the weight read transposed; the weight gradient
    sums runs of each tap's pairs and adds the runs in a fixed order. No atomics: two runs give the same bits.
    """

    name: ClassVar[str] = "triton_implicit_gemm"

    def __init__(self) -> None:
        #: what runs for (form of operands, taps, size of the map, device, whether choices are timed)
        self._specs: dict[tuple[object, ...], ConvSpec | WeightGradSpec] = {}

    def unsupported(self, request: Request) -> str | None:
        """None on a CUDA device for half, bfloat16 and single precision; else why not."""
        if request.dtype not in DTYPES:
            return f"computes in float16, bfloat16, float32, int8 and float8_e4m3fn, not in {request.dtype}; cast it"
        if request.device.type != "cuda":
            no = f"runs on CUDA devices, not on {request.device}; TRITON_INTERPRET=1 runs it slowly on the CPU"
            return None if interpreted() and request.device.type == "cpu" else no
        if request.dtype == FLOAT8 and card_of(request.device)[1] < (8, 9):
            return "multiplies float8 on GPUs of compute capability 8.9 and later"
        said = refusal(request.device)
        if said is None and request.dtype != torch.float32 and (0, 0) < card_of(request.device)[1] < PTX_FROM:
            return f"Triton multiplies {request.dtype} by the matrix units of Ampere, which {request.device} lacks"
        return said

    def forward(
        self, x: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, bias: Tensor | None = None
    ) -> Tensor:
        return self._conv(x, weight, kernel_map, groups, False, bias)

    def forward_fused(
        self,
        x: Tensor,
        weight: Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: Tensor | None,
        residual: Tensor | None,
        epilogue: Epilogue | None,
    ) -> Tensor:
        return self._conv(x, weight, kernel_map, groups, False, bias, residual, epilogue)

    def integers(
        self,
        x: Tensor,
        weight: Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: Tensor | None = None,
        rescale: Rescale | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        numbers = bias if rescale is None else rescale.packed(bias)
        out = torch.int32 if rescale is None else torch.int8
        return self._conv(x, weight, kernel_map, groups, False, numbers, residual, None, out)

    def float8(
        self,
        x: Tensor,
        weight: Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: Tensor,
        rescale: Float8Rescale | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """fp32 sums, or e4m3 of them in the one store; on fp32 where a GPU has no matrix units for e4m3."""
        if x.is_cuda and card_of(x.device)[1] < (8, 9):
            return super().float8(x, weight, kernel_map, groups, bias, rescale, residual)
        numbers = bias if rescale is None else rescale.packed(bias)
        out = torch.float32 if rescale is None else FLOAT8
        return self._conv(x, weight, kernel_map, groups, False, numbers, residual, None, out)

    def input_grad(self, grad_out: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
        return self._conv(grad_out, weight, kernel_map, groups, True)

    def input_grad_onto(
        self, grad_out: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, other: Tensor
    ) -> Tensor:
        return self._conv(grad_out, weight, kernel_map, groups, True, None, other)

    def weight_grad(self, x: Tensor, grad_out: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
        x, grad_out = with_dense_rows(x), with_dense_rows(grad_out)
        (_, c_in), (_, c_out), dtype = x.shape, grad_out.shape, x.dtype
        out = scratch(kernel_map.num_taps, c_in // groups, c_out, dtype=dtype, device=x.device)
        key = (
            "weight_grad",
            dtype,
            c_in,
            c_out,
            groups,
            x.stride(),
            grad_out.stride(),
            (x.data_ptr() | grad_out.data_ptr()) % 16 == 0,
            precision_of(dtype, x.device),
        )
        step = kernel_map.prepared.get(key)
        if step is None:
            if out.numel() == 0 or kernel_map.num_pairs == 0:
                return out.zero_()
            step = self._bind(
                key,
                (x, grad_out, out),
                kernel_map,
                (c_in, c_out, groups),
                (rows_are_aligned((x, x.stride(0)), (grad_out, grad_out.stride(0))), False),
                weight_grad_candidates,
                partial(WeightGradSpec, x=x, grad_out=grad_out, num_taps=kernel_map.num_taps),
            )
        step(x, grad_out, out)
        return out

    def workspace_bytes(self, request: Request) -> int:
        """The most memory that one verb allocates besides its result, in bytes: fp32 sums, or a copy of the weight."""
        kernel_map, groups = request.kernel_map, request.groups
        weight = kernel_map.num_taps * (request.c_in // groups) * request.c_out
        if not weight:
            return 0
        most = 0
        for aligned in (True, False):
            for transposed in (False, True):
                problem = problem_size(request, aligned, transposed)
                rows = kernel_map.num_in if transposed else kernel_map.num_out
                for config in conv_candidates(problem):
                    copy = weight * request.dtype.itemsize if config.weight_copy else 0
                    slots = (
                        config.tap_groups * -(-rows // SLOT_ALIGNMENT) * SLOT_ALIGNMENT if config.tap_groups > 1 else 0
                    )
                    most = max(most, copy + 4 * slots * problem.group_out * groups)
            problem = problem_size(request, aligned)
            for form in weight_grad_candidates(problem) if request.dtype in FLOATING else ():
                jobs = most_jobs(kernel_map.num_taps, kernel_map.num_pairs, max_jobs(form, problem), JOB_QUANTUM)
                partial_sums = 0 if jobs == kernel_map.num_taps else 4 * jobs * (weight // kernel_map.num_taps)
                most = max(most, partial_sums)
        return most

    def describe(self, request: Request) -> list[str]:
        """The tiles of each verb, and what the row order of the forward wastes. Reads sizes back from the device."""
        kernel_map, groups = request.kernel_map, request.groups
        if not kernel_map.num_pairs or not min(request.c_in, request.c_out):
            return ["there is nothing to multiply"]
        lines = []
        for verb, transposed in (("forward", False), ("input gradient", True)):
            problem = problem_size(request, True, transposed)
            config = conv_candidates(problem)[0]
            schedule = schedule_of(kernel_map, config.block_m, transposed, config.tap_groups, config.morton_runs)
            blocks = -(-problem.pack * problem.group_out // config.block_n) * -(-groups // problem.pack)
            size = f"{config.block_m} rows x {config.block_n} channels, {config.block_k} contracted at once"
            more = [f"{config.warps} warps", f"{config.stages} stages"]
            more += ["Gluon"] * config.gluon + [f"taps in {config.tap_groups} groups"] * (config.tap_groups > 1)
            live = int((schedule.tile_counts > 0).sum())
            lines.append(f"{verb}: {live * blocks:,} tiles of {size} ({', '.join(more)})")
            if not transposed and request.dtype not in FLOATING:
                return lines
            if not transposed:
                rows = config.block_m * int(schedule.tile_counts.sum())
                waste = f"{rows:,} rows of taps for {kernel_map.num_pairs:,} pairs"
                lines.append(f"  its tiles multiply {waste}, {rows / kernel_map.num_pairs:.2f} times as many")
        problem = problem_size(request, True)
        form = weight_grad_candidates(problem)[0]
        jobs = most_jobs(kernel_map.num_taps, kernel_map.num_pairs, max_jobs(form, problem), JOB_QUANTUM)
        size = f"{form.block_i} x {form.block_o} channels, {form.block_p} pairs at once"
        lines.append(
            f"weight gradient: {jobs * tiles_of(form, problem):,} tiles of {size} "
            f"({form.warps} warps, {form.stages} stages{', Gluon' * form.gluon}), {jobs:,} runs of pairs"
        )
        return lines

    def steady_rows(self, request: Request) -> float:
        """Rows from which on each is summed in one order: as many as keep the GPU busy, so that no tap is split."""
        works = (replace(problem_size(request, aligned), num_rows=0) for aligned in (True, False))
        return max(map(steady_rows, works))

    def _conv(
        self,
        x: Tensor,
        weight: Tensor,
        kernel_map: KernelMap,
        groups: int,
        transposed: bool,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        epilogue: Epilogue | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        x = with_dense_rows(x)
        weight = weight.contiguous() if out_dtype is None else weight  # 8 bits are copied unless they lie transposed
        bias = None if bias is None else bias.contiguous()
        residual = None if residual is None else residual.contiguous()
        num_out = kernel_map.num_in if transposed else kernel_map.num_out
        shape, dtype = weight.shape, x.dtype
        c_out = shape[1] * groups if transposed else shape[2]
        out = x.new_empty(num_out, c_out) if out_dtype is None else x.new_empty(num_out, c_out, dtype=out_dtype)
        if not num_out or not c_out:
            return out
        key = (
            transposed,
            dtype,
            out_dtype,
            None if bias is None else bias.dtype,
            None if residual is None else residual.dtype,
            shape,
            groups,
            x.stride(),
            (x.data_ptr() | weight.data_ptr()) % 16 == 0,
            epilogue,
            precision_of(dtype, x.device),
        )
        tensors = (x, weight, out, x if bias is None else bias, x if residual is None else residual)
        step = kernel_map.prepared.get(key)
        if step is None and not x.shape[1]:  # a channel of zeros gives the same sums
            one = x.new_zeros(len(x), groups)
            weight = weight.new_zeros(shape[0], *((shape[1], groups) if transposed else (1, shape[2])))
            return self._conv(one, weight, kernel_map, groups, transposed, bias, residual, epilogue, out_dtype)
        if step is None:
            channels = (c_out, x.shape[1]) if transposed else (x.shape[1], c_out)
            rescale = out_dtype in (torch.int8, FLOAT8)
            spec = partial(ConvSpec, x=x, weight=weight, transposed=transposed, out=out_dtype, rescale=rescale)
            step = self._bind(
                key,
                tensors,
                kernel_map,
                (*channels, groups),
                (rows_are_aligned((x, x.stride(0)), (weight, shape[2])), transposed),
                conv_candidates,
                partial(spec, bias=bias, residual=residual, epilogue=epilogue),
            )
        step(*tensors)
        return out

    def _bind(
        self,
        key: tuple[object, ...],
        tensors: tuple[Tensor, ...],
        kernel_map: KernelMap,
        channels: tuple[int, int, int],
        kind: tuple[bool, bool],
        candidates_of: Callable[[ProblemSize], Sequence[Any]],
        spec_of: Callable[[Any, ProblemSize], ConvSpec | WeightGradSpec],
    ) -> Callable[..., None]:
        """The step for operands of this form (``key``) over a map, where it is kept under ``key``.

        ``kind`` says whether the operands are aligned, and whether it is an input gradient.
        """
        device = tensors[0].device
        form = (key, kernel_map.num_taps, octave(kernel_map, kind[1]), device, autotuned())
        spec = self._specs.get(form)
        if spec is None:
            problem = problem_size(Request(kernel_map, device, tensors[0].dtype, *channels), *kind)
            candidates = candidates_of(problem)

            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                config = candidates[0]
                if device.type == "cuda" and not capturing and len(candidates) > 1:
                    config = _chosen(candidates, lambda each: _bound(spec_of(each, problem), kernel_map), tensors)
            spec = spec_of(config, problem)
            if not capturing:
                self._specs[form] = spec
        step = kernel_map.prepared[key] = _bound(spec, kernel_map)
        return step


def _chosen(candidates: Sequence[Any], step_of: Callable[[Any], Any], tensors: tuple[Tensor, ...]) -> Any:
    """The first candidate that this Triton compiles for this GPU; where they are timed, the fastest that it does."""
    from triton.testing import do_bench  # Triton is loaded where it is used

    times: dict[ConvConfig | WeightGradConfig, float] = {}
    errors: list[Exception] = []
    for config in candidates:
        try:
            step = step_of(config)
            step.compile()
            if not autotuned():
                return config
            times[config] = do_bench(partial(step, *tensors), warmup=10, rep=50, return_mode="median")
        except Exception as error:
            logger.info("candidate %s dropped: %s", config, error)
            errors.append(error)
    if not times:
        raise errors[0]
    return min(times, key=times.__getitem__)


def _bound(spec: ConvSpec | WeightGradSpec, kernel_map: KernelMap) -> Callable[..., None]:
    with list_stream():
        return spec.bind(kernel_map)
