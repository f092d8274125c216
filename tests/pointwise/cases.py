"""What the tests of this room share: tolerances, the interpreter, operations and the functions that judge them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sparseconv.pointwise as pw
from sparseconv.pointwise.operations import activations as act
from sparseconv.pointwise.operations import arithmetic as arith

# The largest error allowed, relative to max(|exact|, 1): rounding of the dtype, a few operations deep; no tf32 here.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 5e-6,
    torch.float16: 2e-3,  # computed in fp32, rounded once
    torch.bfloat16: 1.6e-2,
}


def interpreter_version_fits() -> bool:
    import triton

    return tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3]) >= (3, 7, 1)


def kernels_run() -> bool:
    """Whether kernels can run here: on a GPU, or in the interpreter on CPU tensors."""
    pytest.importorskip("triton")
    return torch.cuda.is_available() or (os.environ.get("TRITON_INTERPRET") == "1" and interpreter_version_fits())


needs_kernels = pytest.mark.skipif(not kernels_run(), reason="needs a GPU or Triton's interpreter (3.7.1 or later)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None, factor: float = 1.0) -> None:
    """Equal within the tolerance of the dtype; bit for bit for dtypes that have none."""
    assert got.shape == exact.shape
    kind = dtype or got.dtype
    if kind not in TOLERANCE:
        assert torch.equal(got.cpu(), exact.cpu().to(got.dtype))
        return
    a, b = got.detach().cpu().double(), exact.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1.0))
    assert error.numel() == 0 or error.max().item() <= TOLERANCE[kind] * factor, error.max().item()


@dataclass(frozen=True)
class Unary:
    name: str
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    numbers: tuple[float, ...] = ()


UNARY = [
    Unary("relu", pw.relu, torch.relu),
    Unary("leaky_relu", pw.leaky_relu, F.leaky_relu, (0.2,)),
    Unary("gelu", pw.gelu, F.gelu),
    Unary("gelu_tanh", pw.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    Unary("silu", pw.silu, F.silu),
    Unary("sigmoid", pw.sigmoid, torch.sigmoid),
    Unary("tanh", pw.tanh, torch.tanh),
    Unary("elu", pw.elu, F.elu, (0.7,)),
    Unary("softplus", pw.softplus, F.softplus, (1.5, 20.0)),
    Unary("hardswish", pw.hardswish, F.hardswish),
    Unary("mish", pw.mish, F.mish),
    Unary("clamp", act.clamp_both, torch.clamp, (-0.5, 0.75)),
    Unary("clamp_min", act.clamp_min, torch.clamp_min, (-0.25,)),
    Unary("clamp_max", act.clamp_max, torch.clamp_max, (0.25,)),
    Unary("copy", pw.copy, lambda x: x.clone()),
    Unary("scale", arith.scale, lambda x, factor: x * factor, (-1.75,)),
    Unary("add_number", arith.add_number, lambda x, y, alpha: x + alpha * y, (0.5, 3.0)),
    Unary("divide_by_number", arith.divide_by_number, torch.div, (3.0,)),
]

BINARY = {
    "add": (pw.add, torch.add),
    "sub": (pw.sub, torch.sub),
    "mul": (pw.mul, torch.mul),
    "div": (pw.div, torch.div),
    "swiglu": (pw.swiglu, lambda gate, value: F.silu(gate) * value),
}


def by_kernel(function: Any) -> Callable[..., Any]:
    """The call of a pointwise function by its kernel, on whatever device the tests have."""
    return function.kernel_path
