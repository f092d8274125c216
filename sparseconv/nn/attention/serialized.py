"""Attention within patches of voxels that lie one behind another on a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.checks import check_count, check_kind
from sparseconv.nn.attention.rotary import RotaryPositions
from sparseconv.nn.geometry import grid_in
from sparseconv.nn.module import SparseModule, features_of
from sparseconv.ops.patches import Patches
from sparseconv.ops.serialization import Serialization, serialize
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, Shaped


class RelativePositionBias(torch.nn.Module):
    """A learned bias for each head and relative position, summed over the axes.

        bias[h, i, j] = sum over the axes d of rpe_table[d, clamp(c_i - c_j, -bound, bound)[d], h]

    Source: Wu et al., Point Transformer V3, 2024; the parameter has its name and shape there.

    Args:
        num_heads: H.
        bound: larger differences are clamped to it.
        rank: number of spatial axes, D.

    >>> RelativePositionBias(4, bound=2)(torch.zeros(1, 5, 3, dtype=torch.int32)).shape
    torch.Size([1, 4, 5, 5])
    """

    def __init__(self, num_heads: int, bound: int, *, rank: int = 3) -> None:
        super().__init__()
        check_count("num_heads", num_heads, 1)
        check_count("bound", bound)
        self.num_heads, self.bound, self.rank = num_heads, bound, rank
        self.rpe_table = torch.nn.Parameter(torch.empty(rank * (2 * bound + 1), num_heads))
        torch.nn.init.trunc_normal_(self.rpe_table, std=0.02)

    def forward(self, coords: Integer[torch.Tensor, "patches slots D"]) -> Float[torch.Tensor, "patches H slots slots"]:
        """Voxels (patches, slots, D) int32 -> (patches, H, slots, slots), for logits of rows i and columns j."""
        apart = coords[:, :, None] - coords[:, None]
        starts = torch.arange(self.rank, device=coords.device) * (2 * self.bound + 1)
        entries = apart.clamp(-self.bound, self.bound) + self.bound + starts
        return torch.nn.functional.embedding(entries, self.rpe_table).sum(3).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, bound={self.bound}, rank={self.rank}"


class PatchAttention(SparseModule):
    """What attention in patches shares: queries, keys and values of a width, and the way back.

    Args:
        channels: width, a multiple of ``num_heads``.
        num_heads: H.
        qkv_bias, qk_scale, attn_drop, proj_drop: those of `SerializedAttention`.
        rpe: a bias for relative positions.
        rope: rotates queries and keys by their positions.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        qkv_bias: bool,
        qk_scale: float | None,
        attn_drop: float,
        proj_drop: float,
        rpe: RelativePositionBias | None,
        rope: RotaryPositions | None,
    ) -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_count("num_heads", num_heads, 1)
        if channels % num_heads:
            raise ValueError(f"channels must be a multiple of num_heads; got {channels} and {num_heads}")
        if rope is not None and rope.channels * num_heads != channels:
            raise ValueError(f"a head has {channels // num_heads} channels, but rope turns {rope.channels}")
        self.channels, self.num_heads, self.attn_drop = channels, num_heads, attn_drop
        self.scale = qk_scale or (channels // num_heads) ** -0.5
        self.qkv = torch.nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj = torch.nn.Linear(channels, channels)
        self.proj_drop = torch.nn.Dropout(proj_drop)
        self.rpe, self.rope = rpe, rope

    def _attended(
        self,
        x: SparseTensor,
        patches: Patches,
        order: torch.Tensor,
        inverse: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> SparseTensor:
        features = features_of(x, self, self.channels)
        if self.rope is not None:
            qk, v = (
                self.qkv(features).unflatten(1, (3 * self.num_heads, -1)).split((2 * self.num_heads, self.num_heads), 1)
            )
            turned = self.rope(qk, x.coords[:, 1:] if positions is None else positions)
            qkv = patches.split(torch.cat((turned, v), 1).flatten(1), order)
        elif positions is not None:
            raise ValueError("positions are for rotary positions, and the layer has none: rope=nn.RotaryPositions(...)")
        else:
            qkv = self._split(features, patches, order)
        # each (patches, H, slots, C/H); taken apart first, so that their gradients are stacked as qkv lies
        q, k, v = (t.transpose(1, 2) for t in qkv.unflatten(2, (3, self.num_heads, -1)).unbind(2))
        bias = None
        if self.rpe is not None:
            at = x.coords[:, 1:].index_select(0, patches.rows(order))
            bias = self.rpe(at.unflatten(0, (patches.num_patches, patches.size)))
        dropout = self.attn_drop if self.training else 0.0
        y = patches.attend(q, k, v, bias=bias, scale=self.scale, dropout=dropout)
        del qkv, q, k, v  # before more is made
        return x.with_features(self.proj_drop(self.proj(patches.join(y.transpose(1, 2).flatten(2), inverse))))

    def _split(self, features: torch.Tensor, patches: Patches, order: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of the slots of patches, (patches, slots, 3 C).

        In inference features are brought to slots, which takes less memory than to bring all three, where few slots
        show a row that another one shows.
        """
        slots, autocast = patches.num_patches * patches.size, torch.is_autocast_enabled(features.device.type)
        if torch.is_grad_enabled() or 4 * slots > 5 * features.shape[0]:
            return patches.split(self.qkv(features), order)
        if autocast and features.dtype != torch.float64:
            features = features.to(torch.get_autocast_dtype(features.device.type))
        qkv: torch.Tensor = self.qkv(patches.split(features, order))
        return qkv


class SerializedAttention(PatchAttention):
    """Self-attention within patches of voxels along a curve: PTv3's, and the names of its parameters.

        y = proj(softmax(scale * q k^T + bias) v),  q, k, v = qkv(x), within each patch

    A patch holds ``patch_size`` voxels. The last one of a batch item borrows from the one before it, see `ops.Patches`.
    Attention is torch's `scaled_dot_product_attention`, so flash-attn is not needed.

    Source: Wu et al., Point Transformer V3: Simpler, Faster, Stronger, 2024.

    Args:
        channels: width, a multiple of ``num_heads``.
        num_heads: H.
        patch_size: voxels of a patch, K.
        qkv_bias: whether queries, keys and values have a bias.
        qk_scale: of the logits; default 1 / sqrt(channels / num_heads).
        attn_drop: share of the weights that is dropped.
        proj_drop: share of the result that is dropped.
        order_index: which of the curves.
        enable_rpe: learn a bias for relative positions.
        rope: rotates queries and keys by their positions, `RotaryPositions` of channels / num_heads channels.
        shrink_patches: where an item has fewer voxels than a patch, make all patches as small as it. PTv3 does so
            without flash-attn. Else such an item is a shorter patch by itself.
        rank: number of spatial axes, for relative positions.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(200, 3), voxel_size=0.2)
    >>> SerializedAttention(8, 2, patch_size=16)(SparseTensor(grid, torch.randn(len(grid), 8))).channels
    8
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        patch_size: int = 1024,
        *,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        order_index: int = 0,
        enable_rpe: bool = False,
        rope: RotaryPositions | None = None,
        shrink_patches: bool = False,
        rank: int = 3,
    ) -> None:
        check_count("patch_size", patch_size, 1)
        check_count("order_index", order_index)
        bound = int((4 * patch_size) ** (1 / 3) * 2)
        super().__init__(
            channels,
            num_heads,
            qkv_bias=qkv_bias,
            qk_scale=qk_scale,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            rpe=RelativePositionBias(num_heads, bound, rank=rank) if enable_rpe else None,
            rope=rope,
        )
        self.patch_size, self.order_index = patch_size, order_index
        self.shrink_patches, self.rank = shrink_patches, rank

    def forward(
        self,
        x: SparseTensor,
        curves: Serialization | None = None,
        *,
        positions: Shaped[torch.Tensor, "N D"] | None = None,
    ) -> SparseTensor:
        """A `SparseTensor` -> one on the same grid.

        ``curves`` of that grid, default those of `ops.serialize`; ``positions`` (N, D) that ``rope`` rotates by,
        default the voxels.
        """
        grid = grid_in(x, self)
        if curves is None:
            curves = serialize(grid)
        check_kind("curves", curves, Serialization, "ops.serialize(x.grid) makes one")
        if self.order_index >= len(curves.order):
            raise ValueError(f"the layer takes curve number {self.order_index}, but there are {len(curves.order)}")
        order, inverse = curves.order[self.order_index], curves.inverse[self.order_index]
        if len(order) != len(grid):
            raise ValueError(f"the curves have {len(order)} voxels, the tensor {len(grid)}: serialize its own grid")
        patches = Patches.along(grid, self.patch_size, shrink=self.shrink_patches)
        return self._attended(x, patches, order, inverse, positions)

    def extra_repr(self) -> str:
        words = f"{self.channels}, num_heads={self.num_heads}, patch_size={self.patch_size}"
        return words + (f", order_index={self.order_index}" if self.order_index else "")
