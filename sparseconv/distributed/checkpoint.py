"""A sharded scene on disk: a safetensors file for each rank and an index in JSON, read back by any number of ranks."""

from __future__ import annotations

import hashlib
import json
import math
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparseconv.checks import check_kind
from sparseconv.distributed.agreement import agreed, why
from sparseconv.distributed.grid import ShardedGrid, check_rows, group_of, shard
from sparseconv.distributed.partition import Order
from sparseconv.files import BLOCK, written_whole
from sparseconv.geometry.grid import VoxelGrid

if TYPE_CHECKING:
    from jaxtyping import Shaped

FORMAT = "sparseconv.scene 3"
INDEX, PIECE = "scene.json", "piece_{}.safetensors"


def save(path: str | PathLike[str], grid: ShardedGrid, features: Shaped[torch.Tensor, "N C"] | None = None) -> None:
    """Write every rank's voxels, and features (N, C) if given, into the folder ``path``; all ranks call it.

    Raises ValueError on every rank where a rank's features do not fit its grid, or a rank cannot write.

    >>> from tempfile import TemporaryDirectory
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> with TemporaryDirectory() as folder:
    ...     save(folder, shard(torch.tensor([[0, 7], [0, 3]])), torch.tensor([[3.0], [7.0]]))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['piece_0.safetensors', 'scene.json']
    >>> dist.destroy_process_group()
    """
    check_kind("grid", grid, ShardedGrid, "shard(grid) makes one")

    def checked() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        check_kind("path", path, (str, PathLike), "pass the name of a folder")
        mine = {"coords": grid.coords}
        if features is None:
            return mine, {"features": None}
        check_rows("features", features, len(grid))
        values = features.detach().resolve_conj().resolve_neg()
        mine["features"] = torch.view_as_real(values) if values.is_complex() else values
        return mine, {"features": _kind_of(values)}

    tensors = agreed(checked, grid.group)
    kind = None if features is None else _kind_of(features)

    def write_piece() -> tuple[tuple[str, str], dict[str, Any]]:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / PIECE.format(grid.process_rank)
        with written_whole(file) as part:
            safetensors.torch.save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, str(part))
            return (file.name, checksum(part)), {}

    def write_index() -> tuple[None, dict[str, Any]]:
        if grid.process_rank == 0:
            with written_whole(Path(path) / INDEX) as part:
                part.write_text(json.dumps(about, indent=1) + "\n")
        return None, {}

    try:
        sums: list[Any] = [None] * len(grid.counts)
        dist.all_gather_object(sums, agreed(write_piece, grid.group), group=grid.group)
        about = {
            "format": FORMAT,
            "batch_size": grid.batch_size,
            "voxel_size": grid.voxel_size,
            "origin": grid.origin,
            "is_placed": grid.is_placed,
            "counts": grid.counts,
            "features": kind,
            "sha256": dict(sums),
        }
        agreed(write_index, grid.group)
    except ValueError as error:
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def load(
    path: str | PathLike[str],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    by: Order = "morton",
    device: torch.device | str = "cpu",
) -> tuple[ShardedGrid, Shaped[torch.Tensor, "N C"] | None]:
    """Read a scene that any number of ranks saved, shared anew among the present ones; all ranks call it.

    Returns the rank's grid and its features, or None if none were saved. No code in the folder is run. Raises
    ValueError on every rank if the folder holds no scene of this library, or if its pieces are missing, truncated,
    changed or inconsistent, before any rank uses a voxel.

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
        grid.is_placed = about["is_placed"]
        features = None if features is None else features.to(device)
        return (grid, features, sum(about["counts"])), {"what the folder says": about}

    try:
        grid, features, total = agreed(read, group)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    sharded = shard(grid, group, by)
    if sum(sharded.counts) != total:  # equal on all ranks
        raise ValueError(f"{path} cannot be loaded: {total - sum(sharded.counts)} voxels lie in two pieces of it")
    return sharded, None if features is None else sharded.bring(features)


def checksum(file: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _kind_of(features: torch.Tensor) -> tuple[int, str]:
    return features.shape[1], str(features.dtype).removeprefix("torch.")


def _read(path: Path, rank: int, world: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None]:
    """The pieces rank, rank + world, ... of a saved scene, checked."""
    if not (path / INDEX).is_file():
        raise ValueError(f"there is no {INDEX} in {path}: nothing was saved there, or saving was cut short")
    about = _checked((path / INDEX).read_bytes())
    width = 1 + len(about["voxel_size"])
    coords = [torch.empty(0, width, dtype=torch.int32)]
    features = None if about["features"] is None else [torch.empty(0, about["features"][0], dtype=about["dtype"])]
    for piece in range(rank, len(about["counts"]), world):
        file = path / PIECE.format(piece)
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
        if checksum(file) != about["sha256"].get(file.name):
            raise ValueError(f"{file.name} is not what was saved: its checksum differs")
        found = safetensors.torch.load_file(str(file))
        kinds = {name: (t.dtype, tuple(t.shape)) for name, t in found.items()}
        count = about["counts"][piece]
        wanted = {"coords": (torch.int32, (count, width))}
        if features is not None:
            pair = (2,) if about["dtype"].is_complex else ()
            wanted["features"] = (about["dtype"].to_real(), (count, about["features"][0], *pair))
        if kinds != wanted:
            raise ValueError(f"{file.name} holds {kinds}, and {INDEX} says {wanted}")
        coords.append(found["coords"])
        if features is not None:
            values = found["features"]
            features.append(torch.view_as_complex(values) if about["dtype"].is_complex else values)
    return about, torch.cat(coords), None if features is None else torch.cat(features)


def _checked(text: bytes) -> dict[str, Any]:
    """What an index says, of the kinds that it should be, with the features' dtype as torch's; a ValueError else."""
    about: Any = json.loads(text)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        said = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise ValueError(f"format {said!r} is not {FORMAT!r}, which this version reads")

    def is_count(value: Any) -> bool:
        return type(value) is int and value >= 0

    def axes(name: str) -> int:
        value = about.get(name)
        if not isinstance(value, list) or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in value):
            return 0
        return len(value)

    counts, features = about.get("counts"), about.get("features")
    dtype: Any = None if features is None else torch.float32
    if isinstance(features, list) and len(features) == 2 and is_count(features[0]) and isinstance(features[1], str):
        dtype = getattr(torch, features[1], None)
    fits = {
        "batch_size": is_count(about.get("batch_size")),
        "counts": isinstance(counts, list) and bool(counts) and all(map(is_count, counts)),
        "voxel_size": 1 <= axes("voxel_size") <= 4,
        "origin": axes("origin") == axes("voxel_size"),
        "is_placed": isinstance(about.get("is_placed"), bool),
        "features": features is None or (isinstance(features, list) and isinstance(dtype, torch.dtype)),
        "sha256": isinstance(about.get("sha256"), dict),
    }
    for name, holds in fits.items():
        if not holds:
            raise ValueError(f"{name} of {INDEX} is {str(about.get(name))[:80]}")
    return {**about, "dtype": dtype}
