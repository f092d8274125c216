"""Sparse convolution as one matrix product whose rows are looked up: nothing gathered to memory, nothing scattered."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparseconv.backends.base import Backend, Request
from sparseconv.backends.triton_implicit_gemm.config import (
    Work,
    conv_candidates,
    weight_grad_candidates,
)
from sparseconv.backends.triton_implicit_gemm.schedule import schedule_of
from sparseconv.backends.triton_implicit_gemm.steps import (
    PARTIAL_BYTES,
    ConvStep,
    WeightGradStep,
    interpreted,
    precision_of,
)
from sparseconv.backends.triton_implicit_gemm.tuning import Tuner
from sparseconv.geometry.kernel_map import KernelMap

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonImplicitGemm(Backend):
    """Output-stationary tiles over rows sorted by their tap masks; each tile visits its live taps only.

    The input gradient is the same kernel over the reversed edges with the weight read transposed; the weight gradient
    sums runs of each tap's pairs and adds the runs in a fixed order. No atomics: two runs give the same bits.
    """

    name: ClassVar[str] = "triton_implicit_gemm"

    def __init__(self) -> None:
        self._tuner = Tuner()

    def unsupported(self, request: Request) -> str | None:
        """None on a CUDA device for half, bfloat16 and single precision; else why not."""
        if request.dtype not in DTYPES:
            return f"computes in float16, bfloat16 and float32, not in {request.dtype}; cast, or use another backend"
        if request.device.type != "cuda" and not interpreted():
            return f"runs on CUDA devices, not on {request.device}; TRITON_INTERPRET=1 runs it slowly on the CPU"
        if request.device.type == "cuda" and torch.cuda.get_device_capability(request.device) < (8, 0):
            return f"needs compute capability 8.0 or newer, {torch.cuda.get_device_name(request.device)} is older"
        return None

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y (N_out, C_out) from x (N_in, C_in), weight (K, C_in/G, C_out) and an optional bias (C_out,)."""
        return self._conv(x, weight, kernel_map, groups, False, bias)

    def forward_fused(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        epilogue: Epilogue | None,
    ) -> torch.Tensor:
        """epilogue(forward + residual (N_out, C_out)) on the fp32 sums, in the one store."""
        return self._conv(x, weight, kernel_map, groups, False, bias, residual, epilogue)

    def input_grad(
        self, grad_out: torch.Tensor, weight: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> torch.Tensor:
        """dL/dx (N_in, C_in): the forward kernel over the reversed edges, with the weight transposed."""
        return self._conv(grad_out, weight, kernel_map, groups, True)

    def weight_grad(self, x: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int) -> torch.Tensor:
        """dL/dw (K, C_in/G, C_out): runs of each tap's pairs, summed in fp32 and added in a fixed order."""
        x, grad_out = _rows(x), _rows(grad_out)
        group_in, c_out = x.shape[1] // groups, grad_out.shape[1]
        out = torch.empty(kernel_map.num_taps, group_in, c_out, dtype=x.dtype, device=x.device)
        if out.numel() == 0 or kernel_map.num_pairs == 0:
            return out.zero_()
        aligned = _aligned(x, x.stride(0)) and _aligned(grad_out, grad_out.stride(0))
        key = (
            "weight_grad",
            x.dtype,
            x.shape[1],
            c_out,
            groups,
            x.stride(0),
            grad_out.stride(0),
            aligned,
            precision_of(x.dtype),
        )
        step = kernel_map.prepared.get(key)
        if step is None:
            step = self._prepare_weight_grad(x, grad_out, kernel_map, groups, out, aligned)
            kernel_map.prepared[key] = step
        with _on(x):
            step(x, grad_out, out)
        return out

    def workspace_bytes(self, request: Request) -> int:
        """The most memory that one verb allocates beside its result, in bytes: the weight gradient's partial sums."""
        size = 4 * request.kernel_map.num_taps * (request.c_in // max(1, request.groups)) * request.c_out
        copy = size // 4 * request.dtype.itemsize if min(request.c_in, request.c_out) >= 256 else 0
        return max(size + PARTIAL_BYTES, copy)

    def explain(self, request: Request) -> dict[str, Any]:
        """What was chosen and timed for maps and channels like this request's, and the waste of its row order.

        Reads sizes back from the device: for people, not for hot loops.
        """
        kernel_map = request.kernel_map
        report: dict[str, Any] = {"backend": self.name, "flops": request.flops, "pairs": kernel_map.num_pairs}
        for verb, transposed in (("forward", False), ("input_grad", True)):
            work = work_of(request, True, transposed)
            report[verb] = self._tuner.explain(("conv", *work.key()), conv_candidates(work))
        work = work_of(request, True)
        report["weight_grad"] = self._tuner.explain(("weight_grad", *work.key()), weight_grad_candidates(work))
        schedule = schedule_of(kernel_map, report["forward"]["config"].block_m)
        executed = int(schedule.tile_counts.sum()) * schedule.block_m
        report["executed_rows"] = executed
        report["waste"] = executed / max(1, kernel_map.num_pairs)
        return report

    def _conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        transposed: bool,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        x = _rows(x)
        weight = weight if weight.is_contiguous() else weight.contiguous()
        residual = residual if residual is None or residual.is_contiguous() else residual.contiguous()
        num_out = kernel_map.num_in if transposed else kernel_map.num_out
        c_out = weight.shape[1] * groups if transposed else weight.shape[2]
        out = torch.empty(num_out, c_out, dtype=x.dtype, device=x.device)
        if out.numel() == 0:
            return out
        aligned = _aligned(x, x.stride(0)) and _aligned(weight, weight.shape[2])
        dtypes = (x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype)
        key = (
            "conv",
            transposed,
            dtypes,
            weight.shape,
            groups,
            x.stride(0),
            aligned,
            epilogue,
            precision_of(x.dtype),
        )
        step = kernel_map.prepared.get(key)
        tensors = (x, weight, out, x if bias is None else bias, x if residual is None else residual)
        with _on(x):
            if step is None:
                channels = (c_out, x.shape[1]) if transposed else (x.shape[1], c_out)
                work = work_of(Request(kernel_map, x.device, x.dtype, *channels, groups), aligned, transposed)
                activation = None if epilogue is None else epilogue.scalar
                extras = (bias is not None, transposed, False, residual is not None, activation)
                step = kernel_map.prepared[key] = self._tuner.choose(
                    ("conv", *work.key()),
                    conv_candidates(work),
                    lambda config: ConvStep(config, work, x, weight, kernel_map, out, *extras),
                    tensors,
                )
            step(*tensors)
        return out

    def _prepare_weight_grad(
        self,
        x: torch.Tensor,
        grad_out: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        out: torch.Tensor,
        aligned: bool,
    ) -> WeightGradStep:
        work = work_of(Request(kernel_map, x.device, x.dtype, x.shape[1], grad_out.shape[1], groups), aligned)
        with _on(x):
            return self._tuner.choose(
                ("weight_grad", *work.key()),
                weight_grad_candidates(work),
                lambda config: WeightGradStep(config, work, kernel_map, x, grad_out, out),
                (x, grad_out, out),
            )


def work_of(request: Request, aligned: bool, transposed: bool = False) -> Work:
    """The estimate's view of a request: of its forward and weight gradient, or, transposed, of its input gradient."""
    kernel_map, groups = request.kernel_map, request.groups
    channels = (request.c_in // groups, request.c_out // groups)
    channels = channels[::-1] if transposed else channels
    work = Work(
        request.dtype,
        kernel_map.num_in if transposed else kernel_map.num_out,
        kernel_map.num_pairs,
        kernel_map.num_taps,
        *channels,
        groups,
        aligned,
        transposed=transposed,
        precision=precision_of(request.dtype),
    )
    if request.device.type != "cuda":
        return replace(work, capability=(0, 0))
    properties = torch.cuda.get_device_properties(request.device)
    capability = (properties.major, properties.minor)
    return replace(work, processors=properties.multi_processor_count, capability=capability)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its rows are not contiguous runs of channels."""
    if (x.stride(1) != 1 and x.shape[1] > 1) or x.stride(0) < x.shape[1]:
        return x.contiguous()
    return x


def _aligned(x: torch.Tensor, stride: int) -> bool:
    return x.data_ptr() % 16 == 0 and stride * x.element_size() % 16 == 0


class _on:
    """The device of a tensor as the current one; nothing at all where it is already, or on the CPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self._index = x.get_device()
        self._guard: torch.cuda.device | None = None

    def __enter__(self) -> None:
        if self._index >= 0 and torch.cuda.current_device() != self._index:
            self._guard = torch.cuda.device(self._index)
            self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*error)
