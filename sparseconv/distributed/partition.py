"""Which rank owns a place in space: a small rule that every rank knows and that answers for any coordinate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange, Ints

if TYPE_CHECKING:
    from jaxtyping import Int64, Integer

Order = Literal["morton", "slab", "kd"]


@dataclass(frozen=True)
class Partition:
    """Coordinates -> owners, by cutting an order of space into one run per rank.

        owner(c) = number of cuts that are <= key(floor(c * numerator / denominator))

    ``slab`` orders by the longest axis, ``morton`` along a Z curve, and ``kd`` cuts boxes in halves, axis after axis.
    Coordinates outside of the box it was made for belong to the owner of the nearest place inside. A partition follows
    strides: that of a coarser or finer grid is the same rule, scaled, so that a voxel and its children stay together.

    >>> halves = Partition("slab", IndexRange((0, 0), (1, 8)), cuts=(4,))
    >>> halves.owners(torch.tensor([[0, 1], [0, 6]])).tolist()
    [0, 1]
    """

    order: Order
    box: IndexRange  # batch first
    cuts: tuple[int, ...]  # world size - 1 of them, ascending; for kd in the order of `tree`
    tree: tuple[tuple[int, int, int], ...] = ()  # kd: (first rank, last rank, axis) of each cut, parents first
    numerator: Ints = ()
    denominator: Ints = ()

    @property
    def world_size(self) -> int:
        return len(self.cuts) + 1

    def scaled(self, numerator: Ints, denominator: Ints) -> Partition:
        """The same regions of space for a grid whose coordinates times numerator / denominator are this one's."""
        ones = (1,) * len(numerator)
        return replace(
            self,
            numerator=tuple(a * b for a, b in zip(self.numerator or ones, numerator)),
            denominator=tuple(a * b for a, b in zip(self.denominator or ones, denominator)),
        )

    def owners(self, coords: Integer[torch.Tensor, "M 1+D"]) -> Int64[torch.Tensor, " M"]:
        """Owner (M,) int64 of each coordinate (M, 1+D) of any integer dtype."""
        places = coords.long()
        if self.numerator:
            scale = [torch.tensor((1, *v), device=coords.device) for v in (self.numerator, self.denominator)]
            places = torch.div(places * scale[0], scale[1], rounding_mode="floor")
        low = torch.tensor(self.box.start, device=coords.device)
        high = torch.tensor(self.box.end, device=coords.device) - 1
        places = torch.minimum(torch.maximum(places, low), torch.maximum(high, low))
        if self.order == "kd":
            return self._walk(places)
        keys = _keys(places, self.order, self.box)
        cuts = torch.tensor(self.cuts, dtype=torch.int64, device=coords.device)
        return torch.searchsorted(cuts, keys, right=True)

    def _walk(self, places: torch.Tensor) -> torch.Tensor:
        first = torch.zeros(len(places), dtype=torch.int64, device=places.device)
        for (start, end, axis), cut in zip(self.tree, self.cuts):
            right = (first == start) & (places[:, axis] >= cut)
            first[right] = (start + end + 1) // 2
        return first


def find_partition(coords: torch.Tensor, order: Order, batch_size: int, group: dist.ProcessGroup | None) -> Partition:
    """Cuts that give every rank an equal number of the coordinates (M, 1+D) that the ranks hold together.

    Found by bisection over keys with one all-reduced count a round: exact up to ties, whatever rank holds what, and no
    rank ever sees another's coordinates. A coordinate that two ranks hold counts twice.
    """
    world = dist.get_world_size(group)
    box = common_box(coords, batch_size, group)
    places = coords.long()
    if order == "kd":
        return _kd(places, box, world, group)
    keys = _keys(places, order, box).sort().values
    total = _sum(torch.tensor([len(keys)]), coords.device, group)
    wanted = torch.tensor([-(-total.item() * r // world) for r in range(1, world)], dtype=torch.int64)
    cuts = _bisect(partial(_below, keys), wanted, 2**62, coords.device, group)
    return Partition(order, box, tuple(cuts.tolist()))


def _bisect(
    count_below: Callable[[torch.Tensor], torch.Tensor],
    wanted: torch.Tensor,
    limit: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The least cut for each wanted number such that at least so many keys of all ranks lie below it."""
    low = torch.zeros_like(wanted)
    high = torch.full_like(wanted, limit)
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = _sum(count_below(middle).cpu(), device, group) >= wanted
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    return low


def _below(column: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """How many numbers of a sorted column lie below each cut."""
    return torch.searchsorted(column, cuts.to(column.device))


def _kd(places: torch.Tensor, box: IndexRange, world: int, group: dist.ProcessGroup | None) -> Partition:
    """Cut the ranks in halves, and with them the longest axis of the half's own voxels in proportion."""
    tree: list[tuple[int, int, int]] = []
    cuts: list[int] = []
    waiting = [(0, world - 1, torch.ones(len(places), dtype=torch.bool, device=places.device))]
    while waiting:
        first, last, inside = waiting.pop()
        if first == last:
            continue
        part = places[inside]
        bounds = common_box(part, 1, group)
        axis = max(range(len(bounds.start)), key=lambda a: bounds.shape[a]) if bounds.size else 1
        middle = (first + last + 1) // 2
        total = int(_sum(torch.tensor([len(part)]), places.device, group))
        wanted = torch.tensor([-(-total * (middle - first) // (last - first + 1))])
        base = bounds.start[axis]
        column = (part[:, axis] - base).sort().values
        longest = max(1, bounds.shape[axis])
        cut = base + int(_bisect(partial(_below, column), wanted, longest, places.device, group))
        tree.append((first, last, axis))
        cuts.append(cut)
        right = places[:, axis] >= cut
        waiting += [(middle, last, inside & right), (first, middle - 1, inside & ~right)]
    return Partition("kd", box, tuple(cuts), tuple(tree))


def _keys(places: torch.Tensor, order: Order, box: IndexRange) -> torch.Tensor:
    """Places inside of the box -> their position (M,) int64 along the order of space."""
    if order == "slab":
        axes = sorted(range(1, box.rank), key=lambda a: -box.shape[a])
        axes = [*axes, 0]
        turned = IndexRange(tuple(box.start[a] for a in axes), tuple(box.end[a] for a in axes))
        return KeySpace(turned).keys(places[:, axes])
    if order != "morton":
        raise ValueError(f"by must be 'morton', 'slab' or 'kd'; got {order!r}")
    # the batch above, then the highest bits of every axis interleaved, as many as 62 bits hold
    bits = max((n - 1).bit_length() for n in box.shape[1:])
    batch_bits = (box.shape[0] - 1).bit_length()
    levels = min(bits, (62 - batch_bits) // (box.rank - 1))
    keys = places[:, 0] - box.start[0]
    for bit in range(bits - 1, bits - 1 - levels, -1):
        for axis in range(1, box.rank):
            keys = (keys << 1) | (((places[:, axis] - box.start[axis]) >> bit) & 1)
    return keys


def _sum(counts: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    counts = counts.to(device)
    dist.all_reduce(counts, group=group)
    return counts.cpu()


def common_box(coords: torch.Tensor, batch_size: int, group: dist.ProcessGroup | None) -> IndexRange:
    """The bounding box of all ranks' coordinates, batch first and at least ``batch_size`` long there."""
    columns = coords.shape[1]
    edges = torch.full((2 * columns,), -(2**40), dtype=torch.int64, device=coords.device)
    if len(coords):
        low, high = torch.aminmax(coords.long(), dim=0)
        edges = torch.cat([-low, high + 1])
    dist.all_reduce(edges, dist.ReduceOp.MAX, group=group)
    first: list[int] = [-v for v in edges[:columns].tolist()]
    ends: list[int] = edges[columns:].tolist()
    if first[0] > ends[0]:
        return IndexRange((0,) * columns, (max(1, batch_size), *(0,) * (columns - 1)))
    return IndexRange((0, *first[1:]), (max(batch_size, ends[0]), *ends[1:]))
