"""The module that does nothing."""

from __future__ import annotations

from typing import Any

import torch


class Identity(torch.nn.Module):
    """Returns its input."""

    def forward(self, input: Any) -> Any:
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        return out_size
