"""The halo: rows of other ranks that a rank's outputs see."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sparseconv.distributed.exchange import Exchange, send_to
from sparseconv.distributed.grid import ShardedGrid
from sparseconv.geometry.coord_ops import reached, unique_coords
from sparseconv.geometry.edges import torus_of, wrap
from sparseconv.geometry.ranges import Boundary, IndexRange
from sparseconv.geometry.window import Window


def find_halo(
    source: ShardedGrid, target: ShardedGrid, window: Window, boundary: Boundary, is_transposed: bool
) -> tuple[Exchange, torch.Tensor]:
    """The exchange of the rows that outputs see across shards, and the coords of those that this rank receives."""
    torus = torus_of(None, window, boundary)
    coords = target.coords if torus is not None else target.coords[_near_others(source, target, window, is_transposed)]
    coords = coords.long()
    me = source.process_rank
    if is_transposed:
        places = reached(wrap(coords, torus), window, to_fine=False, torus=window.coarse_torus(torus))
    else:
        places = reached(coords, window, to_fine=True, torus=torus)
    asked = unique_coords(places[source.partition.owners(places) != me]).long()
    came, received, order, sent = send_to(asked, source.partition.owners(asked), source.group)
    rows = source.lookup(came)
    answers = torch.empty(len(asked), dtype=torch.uint8, device=source.device)
    dist.all_to_all_single(answers, (rows >= 0).to(torch.uint8), list(sent), list(received), source.group)
    there = answers.bool()
    exchange = Exchange(
        source.group,
        rows[rows >= 0],
        tuple(int((part >= 0).sum()) for part in rows.split(received)),
        tuple(int(part.sum()) for part in there.split(sent)),
        len(source),
    )
    return exchange, asked[order][there].int()


def _near_others(source: ShardedGrid, target: ShardedGrid, window: Window, is_transposed: bool) -> torch.Tensor:
    """(N_out,) bool: this rank's outputs whose region meets the box of another rank's inputs; no other has a halo."""
    mine = torch.tensor([*source.extent.start, *source.extent.end], device=source.device)
    boxes = [torch.empty_like(mine) for _ in range(dist.get_world_size(source.group))]
    dist.all_gather(boxes, mine, group=source.group)
    coords = target.coords[:, 1:]
    near = torch.zeros(len(coords), dtype=torch.bool, device=coords.device)
    for rank, (start, end) in enumerate((box[: source.rank].tolist(), box[source.rank :].tolist()) for box in boxes):
        box = IndexRange(tuple(start), tuple(end))
        if rank == source.process_rank or box.size == 0:
            continue
        seeing = window.projection.region(box) if is_transposed else window.projection.preimage(box)
        if seeing.intersect(target.extent).size:
            low, high = (torch.tensor(edge, device=coords.device) for edge in (seeing.start, seeing.end))
            near |= ((coords >= low) & (coords < high)).all(1)
    return near
