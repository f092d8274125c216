"""Convolution tap by tap: gather the rows that a tap reads, one dense product, add the products to their output rows.

Three strategies move rows: torch's indexing on any device, NumPy's on a CPU, kernels compiled by CuPy on a CUDA GPU.
torch multiplies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sparseconv.backends.base import FLOATING, Backend, Request, not_on_cpu, with_dense_rows
from sparseconv.backends.integers import Rescale
from sparseconv.geometry.kernel_map import KernelMap


class GatherScatter(Backend):
    """The loop over taps; a subclass moves rows.

    The tap that maps every row to itself is one product of the whole matrix and starts the sums. Taps run one after
    another and no row occurs twice in a tap, so nothing is added by atomics and every run gives the same bits.
    """

    #: whether halves are converted to fp32 before they are multiplied
    widens: ClassVar[bool] = False

    @abstractmethod
    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[i] = x[rows[i]]; rows of x are dense, out is contiguous."""

    @abstractmethod
    def scatter_add(self, product: Tensor, rows: Tensor, total: Tensor) -> None:
        """total[rows[i]] += product[i]; both are contiguous, and no row occurs twice."""

    def forward(
        self, x: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, bias: Tensor | None = None
    ) -> Tensor:
        return self.sums(x, weight, kernel_map, groups, bias).to(x.dtype)

    @torch.no_grad()
    def sums(self, x: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, bias: Tensor | None = None) -> Tensor:
        c_in, c_out, wide = x.shape[1], weight.shape[2], torch.promote_types(x.dtype, torch.float32)
        x, weight = (x.to(wide).contiguous(), weight.to(wide)) if self.widens else (with_dense_rows(x), weight)
        total = torch.zeros(kernel_map.num_out, c_out, dtype=wide, device=x.device)
        gathered = torch.empty(kernel_map.max_pairs_per_tap, c_in, dtype=x.dtype, device=x.device)
        products = torch.empty(kernel_map.max_pairs_per_tap, c_out, dtype=wide, device=x.device)
        identity = kernel_map.identity_tap
        if identity is not None:
            _multiply(x, weight[identity], groups, total)
        for tap, ins, outs in _taps(kernel_map):
            if tap != identity:
                self.gather(x, ins, gathered[: len(ins)])
                _multiply(gathered[: len(ins)], weight[tap], groups, products[: len(ins)])
                self.scatter_add(products[: len(ins)], outs, total)
        return total if bias is None else total.add_(bias)

    @torch.no_grad()
    def weight_grad(self, x: Tensor, grad_out: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
        x, grad_out = [t.to(wide).contiguous() if self.widens else with_dense_rows(t) for t in (x, grad_out)]
        c_in, c_out = x.shape[1] // groups, grad_out.shape[1]
        out = torch.zeros(kernel_map.num_taps, c_in, c_out, dtype=x.dtype, device=x.device)
        left, right = (t.new_empty(kernel_map.max_pairs_per_tap, t.shape[1]) for t in (x, grad_out))
        for tap, ins, outs in _taps(kernel_map):
            a, b = (t[: len(ins)] for t in ((x, grad_out) if tap == kernel_map.identity_tap else (left, right)))
            if tap != kernel_map.identity_tap:
                self.gather(x, ins, a)
                self.gather(grad_out, outs, b)
            if c_in == 1 and groups == c_out:
                out[tap] = (a * b).sum(0)
            else:
                out[tap] = torch.bmm(_by_group(a, groups).mT, _by_group(b, groups)).transpose(0, 1).flatten(1)
        return out.to(dtype)

    def workspace_bytes(self, request: Request) -> int:
        """Rows and products of the largest tap; for halves fp32 sums, and on a CPU fp32 operands."""
        kernel_map, channels = request.kernel_map, request.c_in + request.c_out
        size = max(4, request.dtype.itemsize)
        weight = kernel_map.num_taps * request.c_in * request.c_out // request.groups
        widened = max(kernel_map.num_in, kernel_map.num_out) * channels + weight
        return size * (2 * kernel_map.max_pairs_per_tap * channels + widened * (request.dtype.itemsize < 4))


class TorchGatherScatter(GatherScatter):
    """On any device that torch has, by torch alone; halves are computed in fp32.

    Every other backend computes what this one does, for some devices and faster.
    """

    name, widens = "torch_gather_scatter", True

    def unsupported(self, request: Request) -> str | None:
        if request.dtype not in (*FLOATING, torch.int8):
            return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64, or int8 without a gradient"
        return _lacking(request.device, request.dtype)

    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        torch.index_select(x, 0, rows, out=out)

    def scatter_add(self, product: Tensor, rows: Tensor, total: Tensor) -> None:
        total.index_add_(0, rows, product)

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
        """In fp64, whose integers up to 2^53 are exact: sums of int8 products stay below 2^31."""
        sums = self.sums(x.double(), weight.double(), kernel_map, groups, bias).int()
        return sums if rescale is None else rescale.apply(sums, residual)

    def workspace_bytes(self, request: Request) -> int:
        if request.dtype != torch.int8:
            return super().workspace_bytes(request)
        kernel_map = request.kernel_map
        weight = kernel_map.num_taps * request.c_in * request.c_out // request.groups
        widened = kernel_map.num_in * request.c_in + 4 * kernel_map.num_out * request.c_out + weight
        return super().workspace_bytes(replace(request, dtype=torch.float64)) + 8 * widened


class NumpyGatherScatter(TorchGatherScatter):
    """On a CPU, with rows moved by NumPy, which takes less time there."""

    name = "numpy_gather_scatter"

    def unsupported(self, request: Request) -> str | None:
        return not_on_cpu(request)

    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        np.take(x.detach().numpy(), rows.numpy(), axis=0, out=out.numpy(), mode="clip")

    def scatter_add(self, product: Tensor, rows: Tensor, total: Tensor) -> None:
        total.numpy()[rows.numpy()] += product.numpy()


@cache
def _lacking(device: torch.device, dtype: torch.dtype) -> str | None:
    """What a device cannot do of a convolution in a dtype, in torch's words: tried once, with one row."""
    wide = torch.float64 if dtype in (torch.float64, torch.int8) else torch.float32
    try:
        x = torch.ones(1, 1, dtype=dtype, device=device).to(wide)
        row = torch.zeros(1, dtype=torch.int32, device=device)
        torch.mm(x, x.index_select(0, row)).index_add_(0, row, x).to(dtype)
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        what = f"{dtype}, which is computed in {wide}," if dtype != wide else str(dtype)
        return f"{device} does not compute {what} with this torch, which says: {str(error).splitlines()[0]}"
    return None


def _taps(kernel_map: KernelMap) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each live tap with its input and output rows."""
    start = 0
    for tap, count in enumerate(kernel_map.tap_counts):
        if count:
            yield tap, kernel_map.in_rows[start : start + count], kernel_map.out_rows[start : start + count]
        start += count


def _multiply(a: Tensor, w: Tensor, groups: int, out: Tensor) -> None:
    """out = a @ w, group by group, in the dtype of ``out``: fp32 for halves."""
    if groups > 1 and w.shape[0] == 1 and groups == out.shape[1]:
        torch.mul(a, w, out=out)
    elif groups > 1:
        left, right = (_by_group(t, groups).to(out.dtype) for t in (a, w))
        out.copy_(torch.bmm(left, right).transpose(0, 1).flatten(1))
    elif a.dtype == out.dtype:
        torch.mm(a, w, out=out)
    else:
        torch.mm(a, w, out_dtype=out.dtype, out=out)


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """(M, G c) seen as (G, M, c)."""
    return rows.unflatten(1, (groups, rows.shape[1] // groups)).transpose(0, 1)
