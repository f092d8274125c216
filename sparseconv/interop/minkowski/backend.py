"""The names that code takes from ``MinkowskiEngineBackend._C``."""

from __future__ import annotations

import sys

import torch

from sparseconv.interop.minkowski.common import *  # noqa: F403 (its enumerations and keys)
from sparseconv.interop.minkowski.utils import quantize, quantize_label

#: ``import MinkowskiEngineBackend._C`` is this module too
_C = sys.modules[__name__]

quantize_np = quantize_th = quantize
quantize_label_np = quantize_label_th = quantize_label


def is_cuda_available() -> bool:
    """Whether torch has a GPU."""
    return torch.cuda.is_available()


def cuda_version() -> int:
    """The version of CUDA that torch was built for, as 1000 * major + 10 * minor; 0 for none."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return 1000 * int(major) + 10 * int(minor)


cudart_version = cuda_version


def get_gpu_memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current GPU."""
    return torch.cuda.mem_get_info()
