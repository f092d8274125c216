"""The version of torch, as code written for spconv compares it."""

from __future__ import annotations

import torch

PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit()]


def is_amp_enabled() -> bool:
    """Whether autocast is on for CUDA tensors."""
    return torch.is_autocast_enabled("cuda")
