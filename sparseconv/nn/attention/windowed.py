"""Attention within windows of space."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.ranges import per_axis
from sparseconv.nn.attention.rotary import RotaryPositions
from sparseconv.nn.attention.serialized import PatchAttention, RelativePositionBias
from sparseconv.nn.geometry import Axes, grid_in
from sparseconv.ops.patches import Patches
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Shaped


class WindowAttention(PatchAttention):
    """Self-attention among all voxels of each window of space.

        y = proj(softmax(scale * q k^T + bias) v),  q, k, v = qkv(x), within each window floor((c + shift) / window)

    Alternate layers with and without a shift of half a window, so that information crosses windows. All windows are
    padded to the fullest one, so use small windows.

    Sources: Liu et al., Swin Transformer, 2021; Yang et al., Swin3D, 2023.

    Args:
        channels, num_heads, qkv_bias, qk_scale, attn_drop, proj_drop: those of `SerializedAttention`.
        window_size: voxels along each axis, one number or one per axis.
        shift: of the windows' corners, in voxels.
        enable_rpe: learn a bias for relative positions.
        rope: that of `SerializedAttention`.
        rank: number of spatial axes.

    >>> import torch
    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(200, 3), voxel_size=0.1)
    >>> WindowAttention(8, 2, window_size=4, shift=2)(SparseTensor(grid, torch.randn(len(grid), 8))).channels
    8
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        window_size: Axes = 4,
        *,
        shift: Axes = 0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        enable_rpe: bool = False,
        rope: RotaryPositions | None = None,
        rank: int = 3,
    ) -> None:
        size = per_axis(window_size, rank, "window_size", 1)
        super().__init__(
            channels,
            num_heads,
            qkv_bias=qkv_bias,
            qk_scale=qk_scale,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            rpe=RelativePositionBias(num_heads, max(size) - 1, rank=rank) if enable_rpe else None,
            rope=rope,
        )
        self.window_size, self.shift = size, per_axis(shift, rank, "shift")

    def forward(self, x: SparseTensor, *, positions: Shaped[torch.Tensor, "N D"] | None = None) -> SparseTensor:
        """A `SparseTensor` -> one on the same grid; ``rope`` rotates by ``positions`` (N, D), default the voxels."""
        return self._attended(x, *Patches.windows(grid_in(x, self), self.window_size, self.shift), positions)

    def extra_repr(self) -> str:
        shift = f", shift={self.shift}" if any(self.shift) else ""
        return f"{self.channels}, num_heads={self.num_heads}, window_size={self.window_size}{shift}"
