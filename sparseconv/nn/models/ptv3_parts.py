"""Parts of Point Transformer V3: its norm and positional encoding, blocks, pooling along curves and the way back.

Source: Wu et al., Point Transformer V3: Simpler, Faster, Stronger, 2024; names of parameters are Pointcept's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from sparseconv.checks import check_count
from sparseconv.nn.attention.serialized import SerializedAttention
from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import SubmanifoldConv
from sparseconv.nn.features import GELU, Linear
from sparseconv.nn.geometry import LayerGeometry
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm, LayerNorm
from sparseconv.ops.pooling import avg_pool, max_pool, unpool
from sparseconv.ops.serialization import Serialization, serialize
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Shaped

batch_norm = partial(BatchNorm, eps=1e-3, momentum=0.01)


def positional_encoding(channels: int, rank: int) -> Sequential:
    """A 3^3 submanifold convolution, a linear layer and a norm."""
    return Sequential(
        SubmanifoldConv(channels, channels, 3, rank=rank), Linear(channels, channels), LayerNorm(channels)
    )


class DropPath(SparseModule):
    """Stochastic depth: in training, sets a share of the rows to 0 and scales up the others.

    Source: Huang et al., Deep Networks with Stochastic Depth, 2016.

    >>> import sparseconv as sc
    >>> x = SparseTensor(sc.VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 2))
    >>> DropPath(0.5).eval()(x).features.tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0 <= share < 1:
            raise ValueError(f"the share of rows that are dropped must lie in 0 .. 1, without 1; got {share}")
        self.share = share

    def forward(self, x: SparseTensor) -> SparseTensor:
        if not self.training or not self.share:
            return x
        kept = x.features.new_empty(len(x.grid), 1).bernoulli_(1 - self.share)
        return x.with_features(x.features * (kept / (1 - self.share)))

    def extra_repr(self) -> str:
        return f"{self.share}"


class LayerScale(SparseModule):
    """Multiplies each channel by a learned factor, which starts small.

    Source: Touvron et al., Going deeper with Image Transformers, 2021.

    >>> import sparseconv as sc
    >>> x = SparseTensor(sc.VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 2))
    >>> LayerScale(2, 0.5)(x).features.tolist()
    [[0.5, 0.5]]
    """

    def __init__(self, channels: int, start: float = 1e-5) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.full((channels,), float(start)))

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.with_features(x.features * self.gamma)


#: rows that go through an MLP together in inference: what is between its layers takes the most memory there
MLP_ROWS = 2**15


class _MLP(torch.nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, channels: int, hidden: int, drop: float) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = (
            torch.nn.Linear(channels, hidden),
            torch.nn.GELU(),
            torch.nn.Linear(hidden, channels),
        )
        self.drop = torch.nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.shape[0] <= MLP_ROWS:
            return self._of(x)
        return torch.cat([self._of(part) for part in x.split(MLP_ROWS)])

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))
        return y


class PointTransformerBlock(SparseModule):
    """Positional encoding, attention along a curve and an MLP, each added to what came in.

    Args:
        attention: whose width and rank the block has.
        hidden: width within the MLP.
        drop: share that is dropped within the MLP.
        drop_path: share of rows for which attention, or the MLP, is left out in training.
        pre_norm: norms before attention and MLP, not behind their sums.
        layer_scale: what the scales of both begin with; None for no scales.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(200, 3), voxel_size=0.2)
    >>> block = PointTransformerBlock(SerializedAttention(8, 2, 16), hidden=16)
    >>> block(SparseTensor(grid, torch.randn(len(grid), 8))).channels
    8
    """

    def __init__(
        self,
        attention: SerializedAttention,
        hidden: int,
        drop: float = 0.0,
        drop_path: float = 0.0,
        *,
        pre_norm: bool = True,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        channels, self.pre_norm = attention.channels, pre_norm
        self.cpe = positional_encoding(channels, attention.rank)
        self.norm1 = Sequential(LayerNorm(channels))
        self.attn = attention
        self.norm2 = Sequential(LayerNorm(channels))
        self.mlp = Sequential(_MLP(channels, hidden, drop))
        self.ls1, self.ls2 = (
            Sequential() if layer_scale is None else Sequential(LayerScale(channels, layer_scale)) for _ in range(2)
        )
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: SparseTensor,
        curves: Serialization | None = None,
        *,
        encoded: SparseTensor | None = None,
        positions: Shaped[torch.Tensor, "N D"] | None = None,
    ) -> SparseTensor:
        """A `SparseTensor` -> one on the same grid; ``curves`` as `SerializedAttention` takes them.

        ``encoded`` is what the positional encoding reads, if not x; ``positions`` (N, D) are for rotary positions.
        """
        x = x + self.cpe(x if encoded is None else encoded)
        attend = partial(self.attn, curves=curves, positions=None if self.attn.rope is None else positions)
        if self.pre_norm:
            x = x + self.drop_path(self.ls1(attend(self.norm1(x))))
            return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        x = self.norm1(x + self.drop_path(self.ls1(attend(x))))
        return self.norm2(x + self.drop_path(self.ls2(self.mlp(x))))


class SerializedPooling(SparseModule):
    """A linear layer, the maximum of each coarse voxel, norm and GELU; curves come along, shuffled.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: of the coarse voxels floor(c / stride), a power of two.
        renewed: curves that are measured on the coarse grid, as m2 does; then any stride. Default: those that come.
        norm: makes the norm of a width.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(200, 3), voxel_size=0.2)
    >>> pooling = SerializedPooling(4, 8)
    >>> y, curves, plan = pooling(SparseTensor(grid, torch.randn(len(grid), 4)), sc.ops.serialize(grid))
    >>> y.channels, plan.source is grid, plan.target is y.grid
    (8, True, True)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int = 2,
        *,
        renewed: tuple[str, ...] = (),
        norm: Callable[[int], torch.nn.Module] = batch_norm,
        rank: int = 3,
    ) -> None:
        super().__init__()
        check_count("stride", stride, 1)
        if not renewed and stride & (stride - 1):
            raise ValueError(f"strides along a curve are powers of two; got {stride}")
        self.levels, self.renewed = stride.bit_length() - 1, renewed
        self.geometry = LayerGeometry(rank, stride, stride=stride, padding=0)
        self.proj = Linear(in_channels, out_channels)
        self.norm = Sequential(norm(out_channels))
        self.act = GELU()

    def forward(
        self, x: SparseTensor, curves: Serialization
    ) -> tuple[SparseTensor, Serialization, ConvolutionPlan | None]:
        """A tensor and its curves -> those of the coarse grid, and the plan that led there.

        Where the curves have fewer levels left, all stays on its grid and the plan is None.
        """
        x, plan = self.proj(x), None
        if self.renewed or isinstance(curves.depth, torch.Tensor) or 0 < self.levels <= curves.depth:
            plan = self.geometry.plan(x.grid)
            x = SparseTensor(plan.target, max_pool(x.features, plan)[0])
            if not self.renewed:
                rows = plan.kernel_map.neighbors.amax(0).clamp_min(0)
                curves = curves.coarser(x.grid, self.levels, rows)
        if self.renewed:
            curves = serialize(x.grid, self.renewed)
        return self.act(self.norm(x)), curves.shuffled(), plan


def pooled_positions(positions: torch.Tensor, plan: ConvolutionPlan | None) -> torch.Tensor:
    """The mean of the positions in each coarse voxel, in their own dtype whatever autocast says."""
    if plan is None:
        return positions
    with torch.autocast(positions.device.type, enabled=False):
        return avg_pool(positions, plan)


class SerializedUnpooling(SparseModule):
    """Coarse features copied back onto the fine voxels, and added to those; both through linear layer, norm and GELU.

    Args:
        in_channels: channels of the coarse tensor.
        skip_channels: channels of the fine tensor.
        out_channels: channels of the result.
        norm: makes the norm of a width.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(200, 3), voxel_size=0.2)
    >>> x = SparseTensor(grid, torch.randn(len(grid), 4))
    >>> y, _, plan = SerializedPooling(4, 8)(x, sc.ops.serialize(grid))
    >>> SerializedUnpooling(8, 4, 6)(y, x, plan)[0].features.shape == (len(grid), 6)
    True
    """

    def __init__(
        self,
        in_channels: int,
        skip_channels: int,
        out_channels: int,
        norm: Callable[[int], torch.nn.Module] = batch_norm,
    ) -> None:
        super().__init__()
        self.proj, self.proj_skip = (
            Sequential(Linear(width, out_channels), norm(out_channels), GELU())
            for width in (in_channels, skip_channels)
        )

    def forward(
        self, x: SparseTensor, skip: SparseTensor, plan: ConvolutionPlan | None
    ) -> tuple[SparseTensor, SparseTensor]:
        """Coarse tensor, fine tensor and plan of the pooling -> the sum on the fine grid, and the fine part of it."""
        coarse = self.proj(x).features
        if plan is not None:
            coarse = unpool(coarse, plan.transpose())
        fine = self.proj_skip(skip)
        return fine.with_features(fine.features + coarse), fine
