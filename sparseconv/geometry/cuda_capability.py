"""Which cards the kernels of geometry and of the Triton backend run on; asked once a device, before a launch."""

from __future__ import annotations

from functools import cache

import torch

#: the least compute capability: kernels hold asynchronous copies and bfloat16, which Ampere brought
LEAST = (8, 0)


@cache
def refusal(device: torch.device) -> str | None:
    """Why kernels cannot run on this card, and what to do; None where they can. Asked once a device."""
    if torch.version.hip is not None:
        return (
            f"this torch is built for AMD cards (HIP {torch.version.hip}), and the kernels hold NVIDIA's instructions "
            "(PTX), which AMD's compiler drops without an error: keep grids, features and plans on the CPU"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and the "
            f"kernels need {LEAST[0]}.{LEAST[1]} (Ampere) or newer: keep grids, features and plans on the CPU"
        )
    return None


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there and serves this card."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return refusal(device) is None


def check_card(device: torch.device) -> None:
    """Raise ValueError where a grid on this GPU could not be served."""
    said = refusal(device)
    if said is not None:
        raise ValueError(f"nothing can be launched on {device}: {said}")
