"""A sharded scene on disk: one piece a rank, through torch.distributed.checkpoint, read back by any number of ranks."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from sparseconv.distributed.grid import ShardedGrid, group_of, shard
from sparseconv.distributed.partition import Order
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.kinds import check_kind, check_tensor

FORMAT = 1
ABOUT = "sparseconv.scene"


def save(path: str | PathLike[str], grid: ShardedGrid, features: torch.Tensor | None = None) -> None:
    """Write every rank's voxels, and features (N, C) if given, into the folder ``path``; all ranks call it."""
    check_kind("path", path, (str, PathLike), "pass the name of a folder")
    check_kind("grid", grid, ShardedGrid, "shard(grid) makes one")
    if features is not None:
        check_tensor("features", features)
    if features is not None and (features.ndim != 2 or features.shape[0] != len(grid)):
        raise ValueError(f"features must be ({len(grid)}, C), this rank's rows; got {tuple(features.shape)}")
    rank, world = grid.process_rank, len(grid.counts)
    about = {
        "format": FORMAT,
        "world": world,
        "batch_size": grid.batch_size,
        "voxel_size": grid.voxel_size,
        "origin": grid.origin,
        "counts": grid.counts,
    }
    words = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    state: dict[str, Any] = {ABOUT: words, f"coords.{rank}": grid.coords}
    if features is not None:
        state[f"features.{rank}"] = features.detach()
    dcp.save(state, checkpoint_id=path, process_group=grid.group)


def load(
    path: str | PathLike[str],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    by: Order = "morton",
    device: torch.device | str = "cpu",
) -> tuple[ShardedGrid, torch.Tensor | None]:
    """Read a scene that any number of ranks saved, shared anew among the present ones; all ranks call it.

    Returns the rank's grid and its features, None where none were saved. Raises ValueError where the folder holds no
    scene of this library, or one whose pieces are missing, torn or do not fit together, before any rank uses a voxel.
    """
    check_kind("path", path, (str, PathLike), "pass the name of a folder")
    group = group_of(mesh)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    wrong: str | None = None
    about: dict[str, Any] = {}
    coords, features = torch.zeros(0, 2, dtype=torch.int32), None
    try:
        about, coords, features = _read(Path(path), rank, world)
    except (Exception, CheckpointException) as error:  # whatever a torn file raises must reach all ranks alike
        wrong = f"rank {rank}: {str(error).strip().splitlines()[-1]}"
    said: list[str | None] = [None] * world
    dist.all_gather_object(said, wrong, group=group)
    if any(said):
        raise ValueError(f"{path} cannot be loaded: " + "; ".join(s for s in said if s))
    grid = VoxelGrid(coords.to(device), about["batch_size"], about["voxel_size"], about["origin"])
    sharded = shard(grid, group, by)
    return sharded, None if features is None else sharded.bring(features.to(device))


def _read(path: Path, rank: int, world: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None]:
    """The pieces rank, rank + world, ... of a saved scene, checked."""
    metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
    entries = metadata.state_dict_metadata
    words = entries.get(ABOUT)
    if not isinstance(words, TensorStorageMetadata):
        raise ValueError(f"this is no sharded scene: it holds {sorted(entries)[:5]}")
    state: dict[str, Any] = {ABOUT: torch.empty(words.size, dtype=torch.uint8)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    about = json.loads(bytes(state[ABOUT].tolist()))
    if about.get("format") != FORMAT:
        raise ValueError(f"format {about.get('format')!r} is not the {FORMAT} that this version reads")
    pieces = range(rank, about["world"], world)
    state = {}
    for name in ("coords", "features"):
        for piece in pieces:
            entry = entries.get(f"{name}.{piece}")
            if isinstance(entry, TensorStorageMetadata):
                state[f"{name}.{piece}"] = torch.empty(entry.size, dtype=entry.properties.dtype)
            elif name == "coords":
                raise ValueError(f"piece {piece} of {about['world']} is missing")
    dcp.load(state, checkpoint_id=path, no_dist=True)
    for piece in pieces:
        shape = tuple(state[f"coords.{piece}"].shape)
        if shape != (about["counts"][piece], 1 + len(about["voxel_size"])):
            raise ValueError(f"piece {piece} has coords {shape}, but {about['counts'][piece]} voxels were saved")
    coords = [state[f"coords.{p}"] for p in pieces]
    none = torch.zeros(0, 1 + len(about["voxel_size"]), dtype=torch.int32)
    with_features = [name for name in entries if name.startswith("features.")]
    if not with_features:
        return about, torch.cat([none, *coords]), None
    like = entries[with_features[0]]
    empty = torch.empty(0, like.size[1], dtype=like.properties.dtype)  # type: ignore[union-attr]
    return about, torch.cat([none, *coords]), torch.cat([empty, *(state[f"features.{p}"] for p in pieces)])
