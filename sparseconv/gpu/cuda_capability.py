"""Which devices this package's Triton kernels run on, and where geometry is computed for the others."""

from __future__ import annotations

import os
from functools import cache

import torch

from sparseconv.torch_private import allows_tf32

#: the least compute capability: what Triton and CUDA 13 still compile for
LEAST = (7, 5)
#: from which on kernels hold inline PTX; before, and on AMD GPUs, the same kernels are compiled in plain forms
PTX_FROM = (8, 0)
#: AMD's architectures that every kernel is compiled for in the tests
AMD = ("gfx942", "gfx950", "gfx1100", "gfx1201")
#: the oldest Triton whose Gluon the kernels are written for
LEAST_TRITON = (3, 6)
#: devices that compute their own geometry, with or without kernels; for all others the CPU does it, since they may lack
#: fp64, sorts of int64 or searches
SORTING = ("cpu", "cuda")


@cache
def refusal(device: torch.device) -> str | None:
    """Why kernels cannot run on this device; None where they can. Asked once a device."""
    without = _without_triton(device)
    if without is not None:
        return without
    if os.environ.get("SPARSECONV_KERNELS") == "0":
        return "SPARSECONV_KERNELS is 0 in the environment"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return None if name in AMD else f"kernels are compiled for {', '.join(AMD)} of AMD's GPUs, and this is {name}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and the "
            f"kernels need {LEAST[0]}.{LEAST[1]} (Turing) or newer"
        )
    return None


@cache
def _without_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"kernels run on CUDA devices, not on {device}"
    try:
        import triton
    except ImportError:
        return "Triton is not installed: pip install triton, or triton-windows on Windows"
    if tuple(map(int, triton.__version__.split(".")[:2])) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"Triton {triton.__version__} is installed, and the kernels need {least} or newer"
    return None


@cache
def uses_ptx(device: torch.device) -> bool:
    """Whether kernels hold inline PTX on this device, as `launcher.has_ptx` decides where they are compiled."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= PTX_FROM


@cache
def has_triton(device: torch.device) -> bool:
    """Whether kernels without PTX, of pointwise functions and products, run here: on older GPUs, too."""
    return _without_triton(device) is None


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this device; torch's operations serve the others."""
    return refusal(device) is None


def precision_of(dtype: torch.dtype, device: torch.device) -> str:
    """How products of fp32 numbers are taken, by torch's own switch, where there is tf32; halves have one way only."""
    has_tf32 = device.type == "cpu" or uses_ptx(device)
    return "tf32" if has_tf32 and (dtype != torch.float32 or allows_tf32()) else "ieee"


def check_kernels(device: torch.device, what: str) -> None:
    """Raise ValueError for what kernels alone can do, on a GPU that they do not run on."""
    said = None if device.type == "cpu" else refusal(device)
    if said is not None:
        raise ValueError(f"{what} needs this package's kernels on {device}: {said}. Without it, the network runs there")
