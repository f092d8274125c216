"""Without a GPU, Triton's kernels run in its interpreter: this must be said before they are first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
