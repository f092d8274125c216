"""Changed checkpoints: pickled anew and of old, safetensors, those of training programs, and scenes in pieces."""

from __future__ import annotations

import json
import random
import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv.distributed import load, save, shard
from sparseconv.interop import convert_state, read
from tests.fuzz import _files as files

SAFE = {"F32": np.float32, "I64": np.int64, "F64": np.float64, "I32": np.int32, "U8": np.uint8, "F16": np.float16}


def state() -> dict[str, torch.Tensor]:
    """Parameters of spconv's kind, with a norm's."""
    gen = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 3, 3, 3, 4, generator=gen),
        "a.bias": torch.randn(6, generator=gen),
        "n.running_mean": torch.randn(6, generator=gen),
        "n.num_batches_tracked": torch.tensor(3),
        "b.weight": torch.randn(8, 1, 1, 1, 6, generator=gen),
    }


def training() -> dict:
    """What a training program saves."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    return {"model_state": state(), "optimizer": optimizer.state_dict(), "best": np.float64(0.7), "epoch": 3}


def originals(folder: Path) -> list[tuple[str, bytes]]:
    """(name, bytes) of one state in every format."""
    from safetensors.torch import save_file

    torch.save(state(), folder / "new.pth")
    torch.save(training(), folder / "training.ckpt")
    torch.save(state(), folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(state(), str(folder / "safe.safetensors"))
    return [(n, (folder / n).read_bytes()) for n in ("new.pth", "training.ckpt", "old.pth", "safe.safetensors")]


def group(folder: Path) -> None:
    """A group of this process alone, for the scenes."""
    if not dist.is_initialized():
        place = folder / f"meeting{random.SystemRandom().getrandbits(64)}"
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)


def scene() -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates (60, 4) in order and features (60, 2)."""
    cells = torch.arange(60)
    return torch.stack([cells // 30, cells % 5, cells // 5 % 3, cells // 15 % 2], 1).int(), torch.arange(120.0).view(
        60, 2
    )


def make(seed: int, folder: Path):
    """The cases of a seed."""
    made = originals(folder)
    whole = folder / "scene"
    _save_apart(folder, whole)

    def case(number: int) -> files.Case:
        rng = random.Random(f"{seed} {number}")
        if rng.random() < 0.3:
            return "a changed scene", lambda: changed_scene(folder, whole, number, rng)
        name, data = rng.choice(made)
        return f"a changed {name}", lambda: changed_file(folder / f"case{number}_{name}", data, rng)

    return case


def _save_apart(folder: Path, whole: Path) -> None:
    """Save the scene from a child, so that this process, which forks, has no group and none of its threads."""
    import os

    pid = os.fork()
    if not pid:
        code = 1
        try:
            group(folder)
            coords, features = scene()
            sharded = shard(sc.VoxelGrid(coords, 2))
            save(whole, sharded, sharded.bring(features))
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the scene could not be saved")


def changed_file(path: Path, data: bytes, rng: random.Random) -> str:
    """Read a changed file, and convert what it holds."""
    changed = files.mutated(data, rng)
    path.write_bytes(changed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read(path)
        said = verdict(found, path, changed)
        if not said[:1].isupper():
            convert_state(found, "spconv", "sparseconv")
        return said
    finally:
        path.unlink()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(one.values(), (other[k] for k in one))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def verdict(found: dict[str, torch.Tensor], path: Path, data: bytes) -> str:
    """What is to be said of tensors that were read from changed bytes."""
    if same(found, state()):
        return "equal"
    if data[:4] == b"PK\x03\x04":
        return "SILENT difference in an archive with checksums"
    if path.suffix == ".safetensors" and not same(found, plainly(data)):
        return "SILENT difference from the bytes in the file"
    return "other numbers"


def plainly(data: bytes) -> dict[str, torch.Tensor]:
    """A .safetensors file, read by its description."""
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    found = {}
    for key, entry in entries.items():
        if key != "__metadata__":
            start, end = entry["data_offsets"]
            flat = np.frombuffer(data[8 + length + start : 8 + length + end], SAFE[entry["dtype"]]).copy()
            found[key] = torch.from_numpy(flat).reshape(entry["shape"])
    return found


def changed_scene(folder: Path, whole: Path, number: int, rng: random.Random) -> str:
    """Load a scene with one of its files changed, lost, or put in another's place."""
    group(folder)
    place = folder / f"case{number}"
    shutil.copytree(whole, place)
    victim = rng.choice(sorted(p for p in place.iterdir() if p.is_file()))
    if rng.random() < 0.05:
        victim.unlink()
    else:
        victim.write_bytes(files.mutated(victim.read_bytes(), rng))
    try:
        grid, features = load(place)
    finally:
        shutil.rmtree(place)
    coords, wanted = scene()
    rows = sc.VoxelGrid(coords, 2).lookup(grid.coords)
    if len(rows) != 60 or grid.batch_size != 2 or features is None or not torch.equal(features, wanted[rows]):
        return "SILENT difference in a scene with checksums"
    return "equal"


def main(count: int, seed: int) -> list[str]:
    """Failures, in words; ``python -m tests.fuzz checkpoints --count N --seed S``."""
    return files.failures_of("checkpoints", count, seed, make)
