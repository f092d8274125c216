"""Point Transformer V3, whole and in parts: stem, positional encoding, blocks, pooling along curves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch

from sparseconv.checks import check_choice, check_kind
from sparseconv.nn.attention.rotary import RotaryPositions
from sparseconv.nn.attention.serialized import SerializedAttention
from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import ConvolutionModule, SubmanifoldConv
from sparseconv.nn.features import GELU, Linear
from sparseconv.nn.geometry import grid_in
from sparseconv.nn.models.ptv3_parts import (
    PointTransformerBlock,
    SerializedPooling,
    SerializedUnpooling,
    batch_norm,
    pooled_positions,
    positional_encoding,
)
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import LayerNorm
from sparseconv.ops.serialization import ORDERS, Serialization, serialize
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import leave_to_python

if TYPE_CHECKING:
    from jaxtyping import Bool, Shaped

#: arguments of Pointcept's class that choose how numbers are rounded, or norms by data set, which are refused below, or
#: move all positions alike, which attention does not see
WITHOUT_EFFECT = (
    "shift_coords",
    "traceable",
    "upcast_attention",
    "upcast_softmax",
    "pdnorm_decouple",
    "pdnorm_adaptive",
    "pdnorm_affine",
    "pdnorm_conditions",
)


class PointEmbedding(SparseModule):
    """The stem: a 5^3 submanifold convolution without bias, norm, GELU.

    Source: Wu et al., Point Transformer V3: Simpler, Faster, Stronger, 2024; module names are Pointcept's.

    Args:
        in_channels: channels of the input.
        embed_channels: channels of the output.

    >>> sum(p.numel() for p in PointEmbedding(6, 32).parameters())
    24064
    """

    def __init__(self, in_channels: int, embed_channels: int, *, rank: int = 3) -> None:
        super().__init__()
        self.stem = Sequential(
            OrderedDict(
                conv=SubmanifoldConv(in_channels, embed_channels, 5, bias=False, rank=rank),
                norm=batch_norm(embed_channels),
                act=GELU(),
            )
        )

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.stem(x)


class LinearEmbedding(SparseModule):
    """The stem of m2: a linear layer, norm, GELU.

    Args:
        in_channels: channels of the input.
        embed_channels: channels of the output.
        mask_token: learn a token that replaces masked voxels.

    >>> sum(p.numel() for p in LinearEmbedding(6, 32, mask_token=True).parameters())
    320
    """

    def __init__(self, in_channels: int, embed_channels: int, *, mask_token: bool = False) -> None:
        super().__init__()
        parts = {"linear": Linear(in_channels, embed_channels), "norm": LayerNorm(embed_channels), "act": GELU()}
        self.stem = Sequential(OrderedDict(parts))
        self.mask_token: torch.nn.Parameter | None = None
        if mask_token:
            self.mask_token = torch.nn.Parameter(torch.zeros(1, embed_channels))

    def forward(self, x: SparseTensor, mask: Bool[torch.Tensor, " N"] | None = None) -> SparseTensor:
        """A `SparseTensor` -> one on its grid; voxels where ``mask`` (N,) bool is true get the token."""
        y = self.stem(x)
        if mask is None:
            return y
        if self.mask_token is None:
            raise ValueError("a mask needs a token that replaces masked voxels: mask_token=True")
        return y.with_features(torch.where(mask[:, None], self.mask_token.to(y.dtype), y.features))


class ConditionalPositionalEncoding(SparseModule):
    """Conditional positional encoding, x + norm(linear(conv(x))), with a 3^3 submanifold convolution.

    Source: as `PointEmbedding`.

    Args:
        channels: width.

    >>> sum(p.numel() for p in ConditionalPositionalEncoding(32).parameters())
    28800
    """

    def __init__(self, channels: int, *, rank: int = 3) -> None:
        super().__init__()
        self.cpe = positional_encoding(channels, rank)

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x + self.cpe(x)


@dataclass(frozen=True)
class PointTransformerOptions:
    """Options of `PointTransformerV3`; names and defaults are Pointcept's.

    Attributes:
        order: curves, of `ops.serial_codes`; block i of a stage takes curve i.
        stride: of each pooling, powers of two.
        enc_depths, dec_depths: blocks of each stage; ``dec`` is the way back, finest first.
        enc_channels, dec_channels: channels of each stage.
        enc_num_head, dec_num_head: heads of each stage.
        enc_patch_size, dec_patch_size: voxels of a patch, by stage.
        mlp_ratio: hidden width of a block over its own.
        qkv_bias, qk_scale, attn_drop, proj_drop: those of `SerializedAttention`.
        drop_path: share of rows that the last block leaves out in training; others less, in equal steps.
        pre_norm: norms before attention and MLP, not behind their sums.
        shuffle_orders: draw the curves' order at each call, in evaluation too. Poolings always do.
        enable_rpe: learn a bias for relative positions.
        enable_flash: what Pointcept computes with flash-attn: an item that is shorter than a patch is a patch by
            itself. Else all patches are as small as the smallest item. Neither needs flash-attn.
        enc_mode: no way back.
        variant: ``"m1"``, or ``"m2"``, that of Sonata and Concerto: a linear stem, layer norms, curves measured anew at
            each stage, any strides, and an encoding behind an upsampling that sees all. ``"m3"``, that of Utonia, is m2
            with `RotaryPositions` in its attention.
        layer_scale: of m2 and m3: scales of blocks begin with this number.
        mask_token, freeze_encoder: of m2 and m3: learn a token for masked voxels; stem and encoder get no gradient.
        rope_base, jitter_coords, rescale_coords: of m3 alone: base, jitter and rescale of `RotaryPositions`.
        dec_rope_enable: of m3 alone: rotary positions on the way back too.
        rank: number of spatial axes.

    >>> PointTransformerOptions(enc_depths=(1, 1), enc_channels=(8, 16), enc_num_head=(1, 2), enc_patch_size=(32, 32),
    ...                         stride=(2,), enc_mode=True).enc_channels
    (8, 16)
    """

    order: Sequence[str] | str = ("z", "z-trans")
    stride: Sequence[int] = (2, 2, 2, 2)
    enc_depths: Sequence[int] = (2, 2, 2, 6, 2)
    enc_channels: Sequence[int] = (32, 64, 128, 256, 512)
    enc_num_head: Sequence[int] = (2, 4, 8, 16, 32)
    enc_patch_size: Sequence[int] = (48, 48, 48, 48, 48)
    dec_depths: Sequence[int] = (2, 2, 2, 2)
    dec_channels: Sequence[int] = (64, 64, 128, 256)
    dec_num_head: Sequence[int] = (4, 4, 8, 16)
    dec_patch_size: Sequence[int] = (48, 48, 48, 48)
    mlp_ratio: float = 4
    qkv_bias: bool = True
    qk_scale: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    drop_path: float = 0.3
    pre_norm: bool = True
    shuffle_orders: bool = True
    enable_rpe: bool = False
    enable_flash: bool = True
    enc_mode: bool = False
    variant: str = "m1"
    layer_scale: float | None = None
    mask_token: bool = False
    freeze_encoder: bool = False
    rope_base: float = 10000
    jitter_coords: float | None = None
    rescale_coords: float | None = None
    dec_rope_enable: bool = True
    rank: int = 3

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, ("m1", "m2", "m3"))
        if self.variant == "m1" and (self.layer_scale is not None or self.mask_token or self.freeze_encoder):
            raise ValueError("layer_scale, mask_token and freeze_encoder are options of variant='m2' and 'm3'")
        if self.variant != "m3" and (self.jitter_coords is not None or self.rescale_coords is not None):
            raise ValueError("jitter_coords and rescale_coords are options of variant='m3'")
        for name in self.curves:
            check_choice("order", name, ORDERS)
        stages = len(self.enc_depths)
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, bool):
                continue
            if field.name.startswith("enc_") and len(values) != stages:
                raise ValueError(f"{field.name} must name {stages} stages, as enc_depths does; got {tuple(values)}")
            if field.name.startswith("dec_") and not self.enc_mode and len(values) != stages - 1:
                raise ValueError(
                    f"{field.name} must name {stages - 1} stages, one less than enc_depths; got {tuple(values)}"
                )
        if len(self.stride) != stages - 1:
            raise ValueError(
                f"stride must name {stages - 1} poolings, one less than the stages; got {tuple(self.stride)}"
            )

    @property
    def curves(self) -> tuple[str, ...]:
        """The names of the curves."""
        return (self.order,) if isinstance(self.order, str) else tuple(self.order)

    def block(
        self, channels: int, heads: int, patch: int, number: int, drop_path: float, *, back: bool = False
    ) -> PointTransformerBlock:
        """Block ``number`` of a stage of this width, on the way back or not."""
        rope = None
        if self.variant == "m3" and (self.dec_rope_enable or not back):
            drawn = {"jitter": self.jitter_coords or 1.0, "rescale": self.rescale_coords or 1.0}
            rope = RotaryPositions(channels // heads, self.rope_base, rank=self.rank, **drawn)
        attention = SerializedAttention(
            channels,
            heads,
            patch,
            qkv_bias=self.qkv_bias,
            qk_scale=self.qk_scale,
            attn_drop=self.attn_drop,
            proj_drop=self.proj_drop,
            order_index=number % len(self.curves),
            enable_rpe=self.enable_rpe,
            rope=rope,
            shrink_patches=not self.enable_flash,
            rank=self.rank,
        )
        hidden = int(channels * self.mlp_ratio)
        scales: dict[str, Any] = {"pre_norm": self.pre_norm, "layer_scale": self.layer_scale}
        return PointTransformerBlock(attention, hidden, self.proj_drop, drop_path, **scales)


class PointTransformerV3(SparseModule):
    """Point Transformer V3: attention along space-filling curves, with a positional encoding by sparse convolution.

    Sources: Wu et al., Point Transformer V3: Simpler, Faster, Stronger, 2024; Wu et al., Sonata, 2025, for m2; Utonia,
    2026, for m3. Arguments, defaults and names of parameters are those of Pointcept's PT-v3m1, m2 and m3, by
    ``variant``. Their `state_dict` loads as it is.

    Args:
        in_channels: of the input.
        options: those of `PointTransformerOptions`, by name. ``upcast_attention``, ``upcast_softmax``, ``shift_coords``
            and the details of ``pdnorm`` are taken without effect; ``pdnorm_bn`` and ``pdnorm_ln``, norms by data set,
            are refused.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3), voxel_size=0.1)
    >>> net = PointTransformerV3(4, stride=(2,), enc_depths=(1, 1), enc_channels=(8, 16), enc_num_head=(1, 2),
    ...     enc_patch_size=(64, 64), dec_depths=(1,), dec_channels=(12,), dec_num_head=(2,), dec_patch_size=(64,))
    >>> net(SparseTensor(grid, torch.randn(len(grid), 4))).channels
    12
    """

    def __init__(self, in_channels: int = 6, **options: Any) -> None:
        super().__init__()
        for name in ("pdnorm_bn", "pdnorm_ln"):
            if options.pop(name, False):
                raise ValueError(
                    f"{name}=True (separate norms for each dataset) is not supported: use a network without it"
                )
        made = PointTransformerOptions(**{k: v for k, v in options.items() if k not in WITHOUT_EFFECT})
        self.options = made
        wide, second = made.enc_channels, made.variant != "m1"
        norm: Any = LayerNorm if second else batch_norm
        self.embedding: PointEmbedding | LinearEmbedding
        if second:
            self.embedding = LinearEmbedding(in_channels, wide[0], mask_token=made.mask_token)
        else:
            self.embedding = PointEmbedding(in_channels, wide[0], rank=made.rank)
        self.enc = torch.nn.ModuleDict()
        for s, (shares, heads, patch) in enumerate(
            zip(_shares(made.drop_path, made.enc_depths), made.enc_num_head, made.enc_patch_size)
        ):
            stage = torch.nn.ModuleDict()
            if s:
                places: dict[str, Any] = {"renewed": made.curves if second else (), "norm": norm, "rank": made.rank}
                stage["down"] = SerializedPooling(wide[s - 1], wide[s], made.stride[s - 1], **places)
            for i, share in enumerate(shares):
                stage[f"block{i}"] = made.block(wide[s], heads, patch, i, share)
            self.enc[f"enc{s}"] = stage
        if not made.enc_mode:
            self.dec = torch.nn.ModuleDict()
            back, all_shares = (*made.dec_channels, wide[-1]), list(_shares(made.drop_path, made.dec_depths))
            for s in reversed(range(len(wide) - 1)):
                stage = torch.nn.ModuleDict({"up": SerializedUnpooling(back[s + 1], wide[s], back[s], norm)})
                for i, share in enumerate(reversed(all_shares[s])):
                    heads, patch = made.dec_num_head[s], made.dec_patch_size[s]
                    stage[f"block{i}"] = made.block(back[s], heads, patch, i, share, back=True)
                self.dec[f"dec{s}"] = stage
        if second:
            self.apply(_start_small)
        if made.freeze_encoder:
            for parameter in (*self.embedding.parameters(), *self.enc.parameters()):
                parameter.requires_grad_(False)
        self.register_load_state_dict_pre_hook(_take_spconv_weights)

    def forward(
        self,
        x: SparseTensor,
        curves: Serialization | None = None,
        *,
        mask: Bool[torch.Tensor, " N"] | None = None,
        positions: Shaped[torch.Tensor, "N D"] | None = None,
    ) -> SparseTensor:
        """A `SparseTensor` -> one on the same grid (the coarsest, with ``enc_mode``).

        ``curves`` of the grid, in the order that blocks take; default: those of the options, measured as Pointcept
        does, and shuffled if the options say so. ``mask`` (N,) bool: voxels in whose place m2's stem puts its token.
        ``positions`` (N, D) floating point: where m3's attention takes a voxel to be (Pointcept's ``coord``), of a
        coarse one the mean; default the voxels.
        """
        if torch.compiler.is_dynamo_compiling():
            leave_to_python("the patches of attention depend on where voxels lie")
        grid = grid_in(x, self)
        if self.options.variant == "m3":
            wide = torch.promote_types(x.dtype, torch.float32)
            positions = x.coords[:, 1:].to(wide) if positions is None else positions
        elif positions is not None:
            raise ValueError("positions need variant='m3'")
        if curves is None:
            curves = serialize(grid, self.options.curves)
            curves = curves.shuffled() if self.options.shuffle_orders else curves
        check_kind("curves", curves, Serialization, "ops.serialize(x.grid) makes one")
        if mask is not None and not isinstance(self.embedding, LinearEmbedding):
            raise ValueError("masks need variant='m2' or 'm3'")
        x, kept = self.embedding(x) if mask is None else self.embedding(x, mask), []
        for stage in _stages(self.enc):
            if "down" in stage:
                fine = x, curves, positions
                x, curves, plan = stage["down"](x, curves)
                positions = None if positions is None else pooled_positions(positions, plan)
                kept.append(([fine[0], plan], *fine[1:]))
            x = _through(stage, x, curves, positions)
        for stage in () if self.options.enc_mode else _stages(self.dec):
            skip, curves, positions = kept.pop()
            x = _through(stage, x, curves, positions, skip, by_skip=self.options.variant == "m1")
        return x


def _start_small(module: torch.nn.Module) -> None:
    """Weights from a narrow normal distribution, biases 0: how m2 begins."""
    if isinstance(module, (torch.nn.Linear, ConvolutionModule)):
        torch.nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            torch.nn.init.zeros_(module.bias)


def _stages(modules: torch.nn.ModuleDict) -> Iterator[torch.nn.ModuleDict]:
    return (cast(torch.nn.ModuleDict, stage) for stage in modules.values())


def _through(
    stage: torch.nn.ModuleDict,
    x: SparseTensor,
    curves: Serialization,
    positions: torch.Tensor | None,
    skip: list[Any] | None = None,
    by_skip: bool = False,
) -> SparseTensor:
    """The blocks of a stage; first the way up, to the fine tensor and by the plan of ``skip``, which is emptied."""
    encoded = None
    if skip is not None:
        x, encoded = stage["up"](x, *skip)
        encoded = encoded if by_skip else None  # as in Pointcept's m1: the first encoding does not see what came up
        skip.clear()  # in the finest stage it would count in the peak of memory
    for name, block in stage.items():
        if name.startswith("block"):
            x, encoded = block(x, curves, encoded=encoded, positions=positions), None
    return x


def _shares(last: float, depths: Sequence[int]) -> Iterator[list[float]]:
    """What each block of each stage drops: from 0 to ``last`` in equal steps."""
    total = sum(depths)
    shares = [last * number / max(1, total - 1) for number in range(total)]
    for end, depth in zip(accumulate(depths), depths):
        yield shares[end - depth : end]


def _take_spconv_weights(
    module: torch.nn.Module, state: MutableMapping[str, torch.Tensor], prefix: str, *_: Any
) -> None:
    """Weights as spconv has them (C_out, *kernel, C_in) -> (K, C_in, C_out)."""
    for name, layer in module.named_modules():
        weight = state.get(key := f"{prefix}{name}.weight")
        if isinstance(layer, ConvolutionModule) and weight is not None and weight.ndim == 2 + layer.geometry.rank:
            state[key] = weight.flatten(1, -2).permute(1, 2, 0)
