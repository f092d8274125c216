"""Sparse convolution tap by tap: gather rows, multiply with cuBLAS, add the products into their rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

import torch

from sparseconv.backends.base import Backend, Request, turned, with_dense_rows
from sparseconv.backends.cupy_gather_scatter.kernels import CupyRowKernels, RowKernels
from sparseconv.geometry.kernel_map import KernelMap

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CupyGatherScatter(Backend):
    """For each live tap: gather its input rows, multiply by its weight, add into its output rows.

    One buffer, sized by the map's ``max_pairs_per_tap``, holds the gathered rows and their products. The tap that maps
    every row to itself is one product of the whole matrix and starts the sums. Halves are summed in fp32 and rounded
    once. Taps run one after another and no row occurs twice in a tap: two runs give the same bits.
    """

    name: ClassVar[str] = "cupy_gather_scatter"

    def __init__(self, kernels: RowKernels | None = None) -> None:
        self._given = kernels is not None
        self._kernels: RowKernels = CupyRowKernels() if kernels is None else kernels

    def unsupported(self, request: Request) -> str | None:
        """None on a CUDA device with CuPy installed; else why not."""
        if request.dtype not in DTYPES:
            return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64"
        if self._given:
            return None
        if request.device.type != "cuda":
            return f"it runs on CUDA devices and the plan is on {request.device}"
        if not _cupy_installed():
            return "CuPy is not installed: pip install cupy-cuda13x (cupy-cuda12x for CUDA 12)"
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
        return self.sums(x, weight, kernel_map, groups, bias).to(x.dtype)

    def sums(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `forward` rounds, in fp32, or fp64 for fp64: halves are multiplied as halves."""
        x = with_dense_rows(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        c_in, c_out = x.shape[1], weight.shape[2]
        identity = kernel_map.identity_tap
        if identity is None:
            total = torch.zeros(kernel_map.num_out, c_out, dtype=wide, device=x.device)
        else:
            total = torch.empty(kernel_map.num_out, c_out, dtype=wide, device=x.device)
            _multiply(x, weight[identity], groups, total)
        rows = kernel_map.max_pairs_per_tap
        gathered = torch.empty(rows, c_in, dtype=x.dtype, device=x.device)
        products = torch.empty(rows, c_out, dtype=wide, device=x.device)
        for tap, ins, outs in taps(kernel_map):
            if tap == identity:
                continue
            a, z = gathered[: len(ins)], products[: len(ins)]
            self._kernels.gather(x, ins, a)
            _multiply(a, weight[tap], groups, z)
            self._kernels.scatter_add(z, outs, total)
        return total if bias is None else total + bias

    def input_grad(
        self, grad_out: torch.Tensor, weight: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> torch.Tensor:
        """dL/dx (N_in, C_in): the forward over the reversed edges with each group's weight block transposed."""
        return self.forward(grad_out, turned(weight, groups), kernel_map.reverse(), groups)

    def input_grad_onto(
        self,
        grad_out: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        other: torch.Tensor,
    ) -> torch.Tensor:
        total = self.sums(grad_out, turned(weight, groups), kernel_map.reverse(), groups)
        return total.add_(other).to(grad_out.dtype)

    def weight_grad(self, x: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int) -> torch.Tensor:
        """dL/dw (K, C_in/G, C_out): one product a tap over its gathered rows of x and of the gradient."""
        x, grad_out = with_dense_rows(x), with_dense_rows(grad_out)
        c_in, c_out = x.shape[1] // groups, grad_out.shape[1]
        out = torch.zeros(kernel_map.num_taps, c_in, c_out, dtype=x.dtype, device=x.device)
        rows = kernel_map.max_pairs_per_tap
        left = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device)
        right = torch.empty(rows, c_out, dtype=x.dtype, device=x.device)
        for tap, ins, outs in taps(kernel_map):
            a, b = x, grad_out
            if tap != kernel_map.identity_tap:
                a, b = left[: len(ins)], right[: len(ins)]
                self._kernels.gather(x, ins, a)
                self._kernels.gather(grad_out, outs, b)
            a = a.unflatten(1, (groups, c_in)).permute(1, 2, 0)
            b = b.unflatten(1, (groups, c_out // groups)).transpose(0, 1)
            out[tap] = _bmm(a, b).transpose(0, 1).reshape(c_in, c_out)
        return out

    def workspace_bytes(self, request: Request) -> int:
        """The gathered rows and their products of the largest tap, and the fp32 sums of half results."""
        rows = request.kernel_map.max_pairs_per_tap
        size, wide = request.dtype.itemsize, max(4, request.dtype.itemsize)
        sums = 4 * max(request.kernel_map.num_in, request.kernel_map.num_out) * max(request.c_in, request.c_out)
        return rows * (request.c_in + request.c_out) * max(size, wide) + (sums if size < 4 else 0)


def taps(kernel_map: KernelMap) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each live tap with its input and output rows."""
    start = 0
    for tap, count in enumerate(kernel_map.tap_counts):
        if count:
            yield tap, kernel_map.in_rows[start : start + count], kernel_map.out_rows[start : start + count]
        start += count


def _multiply(a: torch.Tensor, w: torch.Tensor, groups: int, out: torch.Tensor) -> None:
    """out = a @ w, group by group, in out's dtype (fp32 for halves, where torch can ask cuBLAS for it)."""
    if groups == 1:
        if a.dtype == out.dtype:
            torch.mm(a, w, out=out)
        elif a.is_cuda and _wide_products():
            torch.mm(a, w, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a.to(out.dtype), w.to(out.dtype), out=out)
        return
    left = a.unflatten(1, (groups, -1)).transpose(0, 1)
    right = w.unflatten(1, (groups, -1)).transpose(0, 1)
    out.copy_(torch.bmm(left.to(out.dtype), right.to(out.dtype)).transpose(0, 1).flatten(1))


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b) if a.is_cuda or a.dtype.itemsize > 2 else torch.bmm(a.float(), b.float())


@cache
def _wide_products() -> bool:
    """Whether torch.mm can write fp32 from halves."""
    a = torch.zeros(1, 1, dtype=torch.float16, device="cuda")
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=torch.zeros(1, 1, device="cuda"))
    except (TypeError, RuntimeError):
        return False
    return True


@cache
def _cupy_installed() -> bool:
    return find_spec("cupy") is not None
