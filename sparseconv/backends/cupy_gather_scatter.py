"""Gather-scatter on a GPU: rows are moved by CUDA kernels that CuPy compiles. Importing this loads no CuPy."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sparseconv.backends.base import FLOATING, Request
from sparseconv.backends.gather_scatter import GatherScatter
from sparseconv.gpu.launch_log import listeners, tell

#: widest first: the CUDA type that moves so many bytes
CHUNKS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
CUDA_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float", torch.float64: "double"}
THREADS = 256
MAX_BLOCKS = 1 << 16


class CupyGatherScatter(GatherScatter):
    """On a GPU: two kernels compiled by NVRTC on first use run on torch's current stream, in torch's memory."""

    name = "cupy_gather_scatter"

    def unsupported(self, request: Request) -> str | None:
        if request.dtype not in FLOATING:
            return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64"
        if request.device.type != "cuda":
            return f"it runs on CUDA devices and the plan is on {request.device}"
        if find_spec("cupy") is None:
            return "CuPy is not installed: pip install cupy-cuda13x (cupy-cuda12x for CUDA 12)"
        return None

    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[i] = x[rows[i]]; zeros where rows[i] is negative. Rows of x may be strided; out is contiguous."""
        size = x.element_size()
        width = x.shape[1] * size
        chunk = common_width(x.data_ptr(), out.data_ptr(), width, x.stride(0) * size)
        chunks = width // chunk
        _launch(
            compiled("gather", gather_options(chunk)),
            x.device,
            rows.shape[0],
            chunks,
            (x.data_ptr(), out.data_ptr(), rows.data_ptr(), rows.shape[0], rows.stride(0), x.stride(0) * size // chunk),
            chunks,
        )

    def scatter_add(self, product: Tensor, rows: Tensor, total: Tensor) -> None:
        """total[rows[i]] += product[i]; nothing where rows[i] is negative; no row occurs twice."""
        channels = product.shape[1]
        width = common_width(channels * 4, 4 * (16 // total.element_size())) // 4
        aligned = product.data_ptr() % (width * product.element_size()) == 0
        aligned = aligned and total.data_ptr() % (width * total.element_size()) == 0
        width = width if aligned else 1
        _launch(
            compiled("scatter_add", scatter_options(product.dtype, total.dtype, width)),
            product.device,
            rows.shape[0],
            channels // width,
            (product.data_ptr(), total.data_ptr(), rows.data_ptr(), rows.shape[0], rows.stride(0)),
            channels,
        )


def common_width(*numbers: int) -> int:
    """The most bytes, 16 at most, that divide every number."""
    bits = 16
    for number in numbers:
        bits |= number
    return bits & -bits


def source(name: str) -> str:
    """The CUDA text of a kernel."""
    return files(__package__).joinpath(f"{name}.cu").read_text(encoding="utf-8")


@cache
def gather_options(chunk: int) -> tuple[str, ...]:
    """Compiler options of the gather kernel for chunks of so many bytes."""
    return (f"-DCHUNK={CHUNKS[chunk]}",)


@cache
def scatter_options(product: torch.dtype, total: torch.dtype, width: int) -> tuple[str, ...]:
    """Compiler options of the scatter kernel for a product dtype, a sum dtype and channels per thread."""
    return (f"-DPRODUCT={CUDA_NAMES[product]}", f"-DSUM={CUDA_NAMES[total]}", f"-DWIDTH={width}")


@cache
def compiled(name: str, options: tuple[str, ...]) -> Any:
    """The kernel of a CUDA text, compiled with these options."""
    import cupy

    return cupy.RawKernel(source(name), name, options=options)


def _launch(kernel: Any, device: torch.device, count: int, across: int, arguments: tuple[int, ...], last: int) -> None:
    """Launch over ``count`` rows of ``across`` pieces on torch's current stream; ``last`` is the 32-bit argument."""
    if listeners:
        tell("a kernel of CuPy", (1, 1, 1), ())
    import cupy
    import numpy as np

    if count == 0 or across == 0:
        return
    x = min(32, 1 << (across - 1).bit_length())
    y = THREADS // x
    blocks = min(MAX_BLOCKS, -(-count // y))
    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(stream.device_index), _cupy_stream(stream):
        kernel((blocks,), (x, y), (*(np.int64(value) for value in arguments), np.int32(last)))


def _cupy_stream(stream: torch.cuda.Stream) -> Any:
    """Torch's stream as CuPy knows it, by the way that the installed CuPy prefers."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)
