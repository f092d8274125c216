"""Train a sparse U-Net on one scene held by several processes.

    torchrun --nproc-per-node 2 examples/sharded_unet.py --tiles 3 --steps 20

A scan (``--scan FILE``, an .npz with ``coords``, or the MNI152 brain that the nilearn package carries) is tiled to a
large scene, each rank making its own tiles, and shared out. The network learns the height of a voxel from its
neighborhood. Writes ``sharded_unet.png``: who owns what, and the loss.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import sparseconv as sc
from sparseconv import nn
from sparseconv.distributed import Sharded, ShardedGrid, shard
from sparseconv.plan import shared_plan


def scan(path: Path | None) -> torch.Tensor:
    """Voxels (N, 3) of one tile, from the origin."""
    if path is None:
        from sparseconv.demo.volume import load_brain

        coords = load_brain(6.0).grid.coords[:, 1:]
    else:
        coords = torch.from_numpy(np.load(path)["coords"]).int()
    return coords - coords.amin(0)


def own_tiles(tile: torch.Tensor, tiles: int, rank: int, world: int) -> torch.Tensor:
    """The tiles of a tiles x tiles field that this rank makes, side by side with a gap, as coords (M, 4)."""
    size = tile.amax(0) + 3
    parts = []
    for index in range(rank, tiles * tiles, world):
        moved = tile + torch.tensor([index // tiles, index % tiles, 0]) * size
        parts.append(torch.cat([torch.zeros(len(moved), 1, dtype=torch.int32), moved], 1))
    return torch.cat(parts) if parts else torch.zeros(0, 4, dtype=torch.int32)


def draw(grid: ShardedGrid, losses: list[float], path: Path) -> None:
    """Owners seen from above, beside the loss; rank 0 writes."""
    whole, owners = grid.gather(torch.full((len(grid), 1), grid.process_rank, dtype=torch.float32, device=grid.device))
    if dist.get_rank() != 0 or owners is None:
        return
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    spots = whole.coords.cpu()
    left.scatter(spots[:, 1], spots[:, 2], c=owners[:, 0].cpu(), s=0.5, cmap="tab10", vmin=0, vmax=9, rasterized=True)
    left.set(title=f"{len(whole):,} voxels by owner", xlabel="x [voxels]", ylabel="y [voxels]", aspect="equal")
    right.plot(losses)
    right.set(title="loss of the whole scene", xlabel="step", ylabel="mean squared error", yscale="log")
    right.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse, shard, train, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scan", type=Path)
    parser.add_argument("--tiles", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--by", default="kd", choices=["kd", "morton", "slab"])
    parser.add_argument("--output", type=Path, default=Path("sharded_unet.png"))
    args = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tile = scan(args.scan)
    grid = shard(own_tiles(tile, args.tiles, rank, world).to(device), by=args.by)
    height = grid.coords[:, 3:].float() / tile[:, 2].max()
    plan = shared_plan(grid, 3)
    if rank == 0:
        print(f"{grid.num_global_voxels:,} voxels over {world} ranks: {grid.counts}")
        print(plan)
    torch.manual_seed(0)
    net = Sharded(nn.UNet(1, 1, (8, 16)).to(device))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    ones = sc.SparseTensor(grid, torch.ones(len(grid), 1, device=device))
    losses = []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeElapsedColumn(), disable=rank != 0) as progress:
        task = progress.add_task("", total=args.steps, loss="")
        for _ in range(args.steps):
            loss = (net(ones).features - height).square().sum() / grid.num_global_voxels
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(grid.all_sum(loss.detach())))
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")
    draw(grid, losses, args.output)
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {args.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
