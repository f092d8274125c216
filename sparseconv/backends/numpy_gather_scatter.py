"""Gather, multiply, scatter: the CPU's strategy."""

from __future__ import annotations

import torch

from sparseconv.backends.base import Backend, Request
from sparseconv.geometry.kernel_map import KernelMap


class NumpyGatherScatter(Backend):
    """For each live tap: gather its input rows, multiply by its weight, add into its output rows."""

    name = "numpy_gather_scatter"

    def unsupported(self, request: Request) -> str | None:
        if request.device.type != "cpu":
            return f"it runs on the CPU and the plan is on {request.device}"
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64"
        return None

    def forward(self, x, weight, kernel_map, groups, bias=None):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.zeros(kernel_map.num_out, weight.shape[2], dtype=wide)
        for tap, ins, outs in _taps(kernel_map):
            y.index_add_(0, outs, _mm(x[ins].to(wide), weight[tap].to(wide), groups))
        return (y if bias is None else y + bias).to(x.dtype)

    def input_grad(self, grad_out, weight, kernel_map, groups):  # type: ignore[no-untyped-def]
        k, c_in, c_out = weight.shape
        turned = weight.reshape(k, c_in, groups, c_out // groups).permute(0, 3, 2, 1).reshape(k, c_out // groups, -1)
        return self.forward(grad_out, turned, kernel_map.reverse(), groups)

    def weight_grad(self, x, grad_out, kernel_map, groups):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x.dtype, torch.float32)
        c_in, c_out = x.shape[1] // groups, grad_out.shape[1]
        result = torch.zeros(kernel_map.num_taps, c_in, c_out, dtype=wide)
        for tap, ins, outs in _taps(kernel_map):
            a = x[ins].to(wide).view(-1, groups, c_in).permute(1, 2, 0)
            b = grad_out[outs].to(wide).view(-1, groups, c_out // groups).transpose(0, 1)
            result[tap] = (a @ b).transpose(0, 1).reshape(c_in, c_out)
        return result.to(x.dtype)

    def workspace_bytes(self, request: Request) -> int:
        wide = max(4, request.dtype.itemsize)
        return request.kernel_map.max_pairs_per_tap * (request.c_in + request.c_out) * wide


def _taps(kernel_map: KernelMap):  # type: ignore[no-untyped-def]
    start = 0
    for tap, count in enumerate(kernel_map.tap_counts):
        if count:
            yield tap, kernel_map.in_rows[start : start + count], kernel_map.out_rows[start : start + count]
        start += count


def _mm(x: torch.Tensor, w: torch.Tensor, groups: int) -> torch.Tensor:
    if groups == 1:
        return x @ w
    a = x.view(len(x), groups, -1).transpose(0, 1)
    return (a @ w.view(w.shape[0], groups, -1).transpose(0, 1)).transpose(0, 1).reshape(len(x), -1)
