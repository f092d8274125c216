"""Derivatives of the functions here, checked."""

from __future__ import annotations

from typing import Any

import torch


def gradcheck(func: Any, inputs: Any, **options: Any) -> bool:
    """``torch.autograd.gradcheck`` of ``func.apply``."""
    return torch.autograd.gradcheck(lambda *x: func.apply(*x), inputs, **options)
