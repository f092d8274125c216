"""A sharded scene on disk: one piece a rank, through torch.distributed.checkpoint, read back by any number of ranks."""

from __future__ import annotations

import hashlib
import json
import math
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from sparseconv.distributed.agreement import agreed, why
from sparseconv.distributed.grid import ShardedGrid, check_rows, group_of, shard
from sparseconv.distributed.metadata import read_metadata, read_tensor
from sparseconv.distributed.partition import Order
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.gpu.digests import bytes_of
from sparseconv.kinds import check_kind

if TYPE_CHECKING:
    from jaxtyping import Shaped

#: 2 has a checksum of each piece; 1 had none, and is read without
FORMAT, READ = 2, (1, 2)
ABOUT = "sparseconv.scene"


def save(path: str | PathLike[str], grid: ShardedGrid, features: Shaped[torch.Tensor, "N C"] | None = None) -> None:
    """Write every rank's voxels, and features (N, C) if given, into the folder ``path``; all ranks call it.

    Raises ValueError on every rank where a rank's features do not fit its grid, or a rank cannot write.

    >>> from tempfile import TemporaryDirectory
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> with TemporaryDirectory() as folder:
    ...     save(folder, shard(torch.tensor([[0, 7], [0, 3]])), torch.tensor([[3.0], [7.0]]))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['.metadata', '__0_0.distcp']
    >>> dist.destroy_process_group()
    """
    check_kind("grid", grid, ShardedGrid, "shard(grid) makes one")
    rank, world = grid.process_rank, len(grid.counts)

    def checked() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        check_kind("path", path, (str, PathLike), "pass the name of a folder")
        mine = {f"coords.{rank}": grid.coords}
        if features is None:
            return mine, {"features": None}
        check_rows("features", features, len(grid))
        values = features.detach().resolve_conj().resolve_neg()
        return {**mine, f"features.{rank}": values}, {"features": (features.shape[1], features.dtype)}

    state: dict[str, Any] = agreed(checked, grid.group)
    sums: list[Any] = [None] * world
    dist.all_gather_object(sums, {name: checksum(tensor) for name, tensor in state.items()}, group=grid.group)
    about = {
        "format": FORMAT,
        "world": world,
        "batch_size": grid.batch_size,
        "voxel_size": grid.voxel_size,
        "origin": grid.origin,
        "is_placed": grid.is_placed,
        "counts": grid.counts,
        "sha256": {name: value for one in sums for name, value in one.items()},
    }
    state[ABOUT] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    try:
        dcp.save(state, checkpoint_id=path, process_group=grid.group)
    except CheckpointException as error:  # no Exception by its kind; torch raises it on all ranks
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def load(
    path: str | PathLike[str],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    by: Order = "morton",
    device: torch.device | str = "cpu",
) -> tuple[ShardedGrid, Shaped[torch.Tensor, "N C"] | None]:
    """Read a scene that any number of ranks saved, shared anew among the present ones; all ranks call it.

    Returns the rank's grid and its features, None where none were saved. Nothing in the folder is run. Raises
    ValueError on every rank where the folder holds no scene of this library, or one whose pieces are missing, torn,
    changed or do not fit together, before any rank uses a voxel.

    >>> from tempfile import TemporaryDirectory
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> with TemporaryDirectory() as folder:
    ...     save(folder, shard(torch.tensor([[0, 7], [0, 3]])), torch.tensor([[3.0], [7.0]]))
    ...     grid, features = load(folder)
    >>> grid.coords.tolist(), features.tolist()
    ([[0, 3], [0, 7]], [[3.0], [7.0]])
    >>> dist.destroy_process_group()
    """
    group = group_of(mesh)
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def read() -> tuple[tuple[VoxelGrid, torch.Tensor | None, int], dict[str, Any]]:
        check_kind("path", path, (str, PathLike), "pass the name of a folder")
        about, coords, features = _read(Path(path), rank, world)
        grid = VoxelGrid(coords.to(device), about["batch_size"], about["voxel_size"], about["origin"])
        grid.is_placed = bool(about.get("is_placed", True))
        features = None if features is None else features.to(device)
        kind = None if features is None else (features.shape[1], features.dtype)
        return (grid, features, sum(about["counts"])), {"what the folder says": about, "its features": kind}

    try:
        grid, features, total = agreed(read, group)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    sharded = shard(grid, group, by)
    if sum(sharded.counts) != total:  # equal on all ranks
        raise ValueError(f"{path} cannot be loaded: {total - sum(sharded.counts)} voxels lie in two pieces of it")
    return sharded, None if features is None else sharded.bring(features)


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's numbers, in the order of its rows."""
    return hashlib.sha256(bytes_of(tensor.cpu()).numpy().data).hexdigest()


def _read(path: Path, rank: int, world: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None]:
    """The pieces rank, rank + world, ... of a saved scene, checked."""
    index = read_metadata(path)
    words = read_tensor(path, index, ABOUT)
    if words is None:
        raise ValueError(f"this is no sharded scene: it holds {sorted(map(str, index.state_dict_metadata))[:5]}")
    about = _checked(json.loads(bytes(words.tolist())))
    lost = [name for name in about.get("sha256", ()) if name not in index.state_dict_metadata]
    if lost:
        raise ValueError(f"{lost[0]} was saved and is missing")
    width = 1 + len(about["voxel_size"])
    coords, features = [torch.zeros(0, width, dtype=torch.int32)], []
    entries = index.state_dict_metadata.items()
    kind: Any = next((entry for name, entry in entries if str(name).startswith("features.")), None)
    for piece in range(rank, about["world"], world):
        where = _piece(path, index, about, f"coords.{piece}")
        if where.shape != (about["counts"][piece], width) or where.dtype != torch.int32:
            raise ValueError(
                f"piece {piece} has {where.dtype} coords {tuple(where.shape)}, but {about['counts'][piece]} voxels "
                "were saved"
            )
        coords.append(where)
        if kind is not None:
            values = _piece(path, index, about, f"features.{piece}")
            if values.ndim != 2 or values.shape[0] != len(where):
                raise ValueError(f"piece {piece} has features {tuple(values.shape)} of {len(where)} voxels")
            features.append(values)
    if kind is None:
        return about, torch.cat(coords), None
    empty = torch.empty(0, kind.size[1], dtype=kind.properties.dtype)
    if any((f.shape[1], f.dtype) != (empty.shape[1], empty.dtype) for f in features):
        raise ValueError("its pieces have features of several widths or dtypes")
    return about, torch.cat(coords), torch.cat([empty, *features])


def _piece(path: Path, index: Any, about: dict[str, Any], name: str) -> torch.Tensor:
    found = read_tensor(path, index, name)
    if found is None:
        raise ValueError(f"{name} of {about['world']} pieces is missing")
    if about["format"] > 1 and about["sha256"].get(name) != checksum(found):
        raise ValueError(f"{name} is not what was saved: its checksum differs")
    return found


def _checked(about: Any) -> dict[str, Any]:
    """What a scene says of itself, of the kinds that it should be."""
    if not isinstance(about, dict) or about.get("format") not in READ:
        said = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise ValueError(f"format {said!r} is not among {READ}, which this version reads")
    numbers = {"world": [about.get("world")], "batch_size": [about.get("batch_size")], "counts": about.get("counts")}
    for name, values in numbers.items():
        if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
            raise ValueError(f"{name} is {str(about.get(name))[:80]}")
    if len(about["counts"]) != about["world"] or not about["world"]:
        raise ValueError(f"it has counts of {len(about['counts'])} pieces, and {about['world']} pieces")
    for name in ("voxel_size", "origin"):
        values = about.get(name)
        if not isinstance(values, list) or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
            raise ValueError(f"{name} is {str(values)[:80]}")
    if not 1 <= len(about["voxel_size"]) <= 4 or len(about["origin"]) != len(about["voxel_size"]):
        raise ValueError(f"voxel_size {about['voxel_size']} and origin {about['origin']} fit no grid")
    if about["format"] > 1 and not isinstance(about.get("sha256"), dict):
        raise ValueError("it has no checksums")
    return about
