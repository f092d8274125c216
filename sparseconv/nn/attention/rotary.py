"""Rotary positions: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sparseconv.checks import check_count, check_tensor
from sparseconv.ops.rows import check_rows, wide

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


class RotaryPositions(torch.nn.Module):
    """Rotary position embedding: rotates pairs of channels of queries and keys, so that their products depend only on
    relative positions.

        angle[n, d, j] = positions[n, d] * base^(-j / F)
        (a, b) -> (a cos - b sin, b cos + a sin)

    Each axis d has C / D channels. Pairs are (j, j + F) among them, for j < F = C / (2 D). Angles are computed in fp64,
    sums in fp32 at least, regardless of autocast. There are no parameters.

    Sources: Su et al., RoFormer, 2021; in three axes LitePT (``base=100``) and Utonia (``base=10000``), whose buffer
    has the name ``inv_freq``.

    Args:
        channels: of a head, C; a multiple of twice the rank.
        base: of the frequencies; larger for scenes of more voxels.
        rank: number of spatial axes, D.
        jitter: in training, stretch each axis by a number from 1 / jitter .. jitter, drawn in each call.
        rescale: in training, stretch all axes by one such number.

    >>> rope = RotaryPositions(12)
    >>> q, k, moved = torch.randn(2, 4, 12), torch.randn(2, 4, 12), torch.tensor([[5, 6, 7]])
    >>> at = torch.tensor([[0, 0, 0], [1, 2, 3]])
    >>> here, there = (rope(q, p)[0] @ rope(k, p)[1].T for p in (at, at + moved))
    >>> torch.allclose(here, there, atol=1e-5)
    True
    """

    inv_freq: Float[torch.Tensor, " C/D/2"]

    def __init__(
        self, channels: int, base: float = 100.0, *, rank: int = 3, jitter: float = 1.0, rescale: float = 1.0
    ) -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_count("rank", rank, 1)
        if channels % (2 * rank):
            raise ValueError(
                f"rotary positions in {rank} axes turn pairs of channels: a head must have a multiple of {2 * rank} "
                f"channels; got {channels}"
            )
        if not base > 0:
            raise ValueError(f"base must be above 0; got {base}")
        for name, most in (("jitter", jitter), ("rescale", rescale)):
            if not most >= 1:
                raise ValueError(f"{name} must be at least 1, which stretches nothing; got {most}")
        self.channels, self.base, self.rank, self.jitter, self.rescale = channels, base, rank, jitter, rescale
        self.register_buffer("inv_freq", self._frequencies())

    def _frequencies(self, device: torch.device | None = None) -> torch.Tensor:
        pairs = self.channels // (2 * self.rank)
        return 1 / self.base ** (torch.arange(pairs, device=device).float() / pairs)

    def forward(
        self, x: Float[torch.Tensor, "N H C"], positions: Shaped[torch.Tensor, "N D"]
    ) -> Float[torch.Tensor, "N H C"]:
        """Queries or keys (N, H, C) and their positions (N, D), of any dtype -> (N, H, C), dtype of x."""
        check_tensor("positions", positions)
        check_rows("x", x, len(positions), "position", positions.device, "positions", (3,))
        if x.shape[2] != self.channels or positions.shape[1:] != (self.rank,):
            raise ValueError(
                f"x must be (N, H, {self.channels}) and positions (N, {self.rank}); "
                f"got {tuple(x.shape)} and {tuple(positions.shape)}"
            )
        stretched = positions
        for most, numbers in ((self.jitter, self.rank), (self.rescale, 1)):
            if self.training and most > 1:
                drawn = x.new_empty(numbers, dtype=torch.promote_types(positions.dtype, torch.float32))
                stretched = stretched * drawn.uniform_(-math.log(most), math.log(most)).exp()
        halved = self.inv_freq.element_size() < 4  # by net.half()
        frequencies = self._frequencies(x.device) if halved else self.inv_freq
        angles = (stretched.double()[:, :, None] * frequencies.double())[:, None]  # (N, 1, D, F)
        cos, sin = (turned.to(wide(x)) for turned in (angles.cos(), angles.sin()))
        a, b = x.to(wide(x)).unflatten(2, (self.rank, 2, -1)).unbind(3)  # (N, H, D, F) each
        return torch.stack((a * cos - b * sin, b * cos + a * sin), 3).flatten(2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, base={self.base}" + (f", rank={self.rank}" if self.rank != 3 else "")
