"""Layers that run a plan."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv.checks import check_kind
from sparseconv.interop.arguments import uniform_
from sparseconv.interop.fvdb.convolution_plan import ConvolutionPlan
from sparseconv.interop.fvdb.grid_batch import steps
from sparseconv.interop.fvdb.jagged_tensor import JaggedTensor


class _Convolution(torch.nn.Module):
    transposed = False

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = 3, stride: Any = 1, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        kernel = steps(kernel_size, "kernel_size")
        self.kernel_size, self.stride = torch.tensor(kernel), torch.tensor(steps(stride, "stride"))
        self.kernel_volume = math.prod(kernel)
        shape = (out_channels, in_channels, *(kernel if self.kernel_volume > 1 else ()))
        self.weight = torch.nn.Parameter(torch.empty(shape))
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within the inverse root of taps times input channels."""
        uniform_(self.in_channels * self.kernel_volume, self.weight, self.bias)

    @property
    def packed_axes(self) -> tuple[int, ...]:
        """The axes of the weight as kernels read it, (*kernel, C_in, C_out), for `nn.pack`."""
        return (*range(2, self.weight.ndim), 1, 0)

    def extra_repr(self) -> str:
        size = f"kernel_size={self.kernel_size.tolist()}, stride={self.stride.tolist()}"
        return f"{self.in_channels}, {self.out_channels}, {size}" + ("" if self.bias is not None else ", bias=False")

    def forward(self, data: JaggedTensor, plan: ConvolutionPlan) -> JaggedTensor:
        """The layer over a plan of its kernel size, stride and direction."""
        check_kind("data", data, JaggedTensor, "JaggedTensor(features) makes one of a tensor")
        check_kind("plan", plan, ConvolutionPlan, "ConvolutionPlan.from_grid_batch makes one")
        if not plan.valid_usage(self.in_channels, self.out_channels, self.kernel_size, self.stride, self.transposed):
            raise ValueError(f"the plan is of another layer than {self}: {plan}")
        made = plan.execute(data, self.weight)
        return made if self.bias is None else made.jagged_like(made.jdata + self.bias)


class SparseConv3d(_Convolution):
    """A convolution with fVDB's weights: (C_out, C_in, k0, k1, k2), or (C_out, C_in) for one tap.

    >>> from sparseconv.interop.fvdb import GridBatch
    >>> grid = GridBatch.from_ijk(JaggedTensor(torch.tensor([[0, 0, 0], [0, 0, 1]])))
    >>> plan = ConvolutionPlan.from_grid_batch(3, 1, grid, grid)
    >>> SparseConv3d(4, 6, 3)(JaggedTensor(torch.ones(2, 4)), plan).jdata.shape
    torch.Size([2, 6])
    """


class SparseConvTranspose3d(_Convolution):
    """The same for plans of the other direction."""

    transposed = True
