"""Which devices this package's Triton kernels run on, and where geometry is computed for the others."""

from __future__ import annotations

from functools import cache

import torch

#: the least compute capability: kernels hold asynchronous copies and bfloat16, which Ampere brought
LEAST = (8, 0)
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
    if torch.version.hip is not None:
        return (
            f"this torch is built for AMD GPUs (HIP {torch.version.hip}), and the kernels hold NVIDIA's instructions "
            "(PTX), which AMD's compiler drops without an error"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and the "
            f"kernels need {LEAST[0]}.{LEAST[1]} (Ampere) or newer"
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
def has_triton(device: torch.device) -> bool:
    """Whether kernels without PTX, of pointwise functions and products, run here: on older GPUs, too."""
    return _without_triton(device) is None


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this device; torch's operations serve the others."""
    return refusal(device) is None


def check_kernels(device: torch.device, what: str) -> None:
    """Raise ValueError for what kernels alone can do, on a GPU that they do not run on."""
    said = None if device.type == "cpu" else refusal(device)
    if said is not None:
        raise ValueError(f"{what} needs this package's kernels on {device}: {said}. Without it, the network runs there")
