"""Exported networks in a new process: whether their results have the bits of the network's own.

    python -m benchmarks.exports --data DIR --json FILE [--clients DIR] [--network NAME ...] [--reach N] [--threads N]

Each network is exported on one scan. Another process, which imports this library and no class of the network, runs
``torch.export.load(path).module()`` on that scan, on two more of other sizes, and on a scene without voxels. Every
number of every output is compared. ``--clients`` is the folder of `benchmarks.clients`: its ``pcdet`` holds OpenPCDet's
own files, whose backbones are exported as they are, under this library's spconv names. ``--reach`` keeps a part of
each scan.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import sparseconv as sc
from benchmarks import ROOT
from benchmarks.clients.networks import make
from benchmarks.clients.scenes import Setting, lidar
from benchmarks.layers.machine import machine
from sparseconv import nn
from sparseconv.bench.report import write
from sparseconv.export import export
from sparseconv.export.program import plain
from sparseconv.interop import spconv
from sparseconv.torch_private import pytree

ITEMS, CHANNELS = 2, 4
OURS: dict[str, Callable[[list[int]], torch.nn.Module]] = {
    "UNet": lambda shape: nn.UNet(CHANNELS, 20),
    "SecondEncoder": lambda shape: nn.SecondEncoder(CHANNELS, shape),
    "VoxelResBackBone8x": lambda shape: nn.VoxelResBackBone8x(CHANNELS, shape),
    "SpUNet": lambda shape: nn.SpUNet(CHANNELS, 20),
    "MinkUNet": lambda shape: nn.MinkUNet(CHANNELS, 20),
}
#: OpenPCDet's classes, and their names among the clients
PCDET = {"OpenPCDet's VoxelBackBone8x": "second", "OpenPCDet's VoxelResBackBone8x": "second_res"}
#: what runs elsewhere
ELSEWHERE = """
import sys, torch, sparseconv
program, scenes, results = sys.argv[1:4]
torch.set_num_threads(int(sys.argv[4]))  # sums over rows are cut by threads
run = torch.export.load(program).module()
assert not [name for name in sys.modules if name.split(".")[0] in ("pcdet", "benchmarks", "spconv")]
torch.save([torch.utils._pytree.tree_leaves(run(*scene)) for scene in torch.load(scenes)], results)
"""


class Exported(NamedTuple):
    """A network, how its input is made, and its scenes (coords, features)."""

    net: torch.nn.Module
    make: Callable[..., Any]
    scenes: list[tuple[torch.Tensor, torch.Tensor]]


def prepared(name: str, setting: Setting) -> Exported:
    """A network in evaluation mode, whose norms have statistics that are not those of a new one."""
    scans, size = lidar(setting, CHANNELS, ITEMS)
    scenes = [(coords, features) for features, coords in scans]
    scenes.append((scenes[0][0][:0], scenes[0][1][:0]))
    torch.manual_seed(0)
    shape = [int(size[2]) + 1, int(size[1]), int(size[0])]
    net = make(PCDET[name], setting).net if name in PCDET else OURS[name](shape)
    norms: list[Any] = [each for each in net.modules() if isinstance(getattr(each, "running_var", None), torch.Tensor)]
    for norm in norms:
        norm.running_mean.uniform_(-0.1, 0.1)
        norm.running_var.uniform_(0.5, 2)
    return Exported(net.eval(), batch if name in PCDET else sparse, scenes)


def sparse(coords: torch.Tensor, features: torch.Tensor) -> sc.SparseTensor:
    return sc.SparseTensor(sc.VoxelGrid(coords, ITEMS), features)


def batch(coords: torch.Tensor, features: torch.Tensor) -> dict[str, Any]:
    """What OpenPCDet's detectors hand their backbone."""
    return {"voxel_coords": coords, "voxel_features": features, "batch_size": ITEMS}


def compared(found: list[Any], wanted: list[Any]) -> bool:
    """Whether all leaves are the same: numbers of tensors bit by bit, dtypes and shapes, and everything else."""
    if len(found) != len(wanted):
        return False
    for mine, theirs in zip(found, wanted):
        if isinstance(theirs, torch.Tensor):
            alike = mine.dtype == theirs.dtype and mine.shape == theirs.shape
            if not alike or _bytes(mine) != _bytes(theirs):
                return False
        elif mine != theirs:
            return False
    return True


def _bytes(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().numpy().tobytes()


def measure(name: str, setting: Setting) -> dict[str, Any]:
    """A network's row: rows of its scenes, outputs, and whether all bits are equal."""
    net, wrap, scenes = prepared(name, setting)
    with TemporaryDirectory() as folder:
        program, given, found = (Path(folder) / file for file in ("program.pt2", "scenes.pt", "results.pt"))
        begin = time.perf_counter()
        export(net, scenes[0], program, make=wrap, batch_size=ITEMS)
        seconds, size = time.perf_counter() - begin, program.stat().st_size
        torch.save(scenes, given)
        words = [sys.executable, "-c", ELSEWHERE, program, given, found, torch.get_num_threads()]
        there = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(list(map(str, words)), cwd=folder, env=there, capture_output=True, text=True)
        if done.returncode:
            return {"network": name, "error": done.stderr[-400:]}
        results = torch.load(found)
    equal, outputs, numbers = [], 0, 0
    for scene, leaves in zip(scenes, results, strict=True):
        x = wrap(*scene)
        with torch.no_grad():
            wanted = pytree.tree_leaves(plain(net(x), x))
        equal.append(compared(leaves, wanted))
        tensors = [leaf for leaf in wanted if isinstance(leaf, torch.Tensor)]
        outputs, numbers = len(tensors), numbers + sum(t.numel() for t in tensors)
    rows = [len(coords) for coords, _ in scenes]
    row = {"network": name, "rows": rows, "outputs": outputs, "numbers": numbers, "bits_equal": all(equal)}
    return {**row, "export_s": seconds, "file_bytes": size}


def main() -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the scans")
    parser.add_argument("--clients", type=Path, help="the folder with the clients' files; without it, ours alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--network", nargs="+", choices=[*OURS, *PCDET])
    parser.add_argument("--reach", type=int, help="keep the cells that lie that near to a scan's middle")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    spconv.install()
    names = args.network or [*OURS, *(PCDET if args.clients else ())]
    setting = Setting(args.clients or Path(), args.data, "cpu", scans=3, reach=args.reach)
    rows, facts = [], machine("cpu") | {"threads": torch.get_num_threads()}
    for name in names:
        row = measure(name, setting)
        rows.append(row)
        says = {True: "yes", False: "NO", None: row.get("error")}[row.get("bits_equal")]
        print(f"{name}: rows {row.get('rows')}, {row.get('outputs')} outputs; bits equal: {says}", flush=True)
        if args.json is not None:
            write(args.json, facts, rows, version="exports", reach=args.reach)
    return int(not all(row.get("bits_equal") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
