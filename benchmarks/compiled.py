"""Networks of `nn` under `torch.compile`, beside eager ones, on scenes whose plans are there.

    python -m benchmarks.compiled --data DIR --json FILE

Each network is one graph (``fullgraph=True``), compiled by inductor. Scenes are eight rotations of a scan with other
numbers of voxels. Their plans are made before, as a loader's workers do it. Times are medians of calls in ms under fp16
autocast, eager and compiled in turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sparseconv as sc
from benchmarks.clients.__main__ import machine
from benchmarks.clients.scenes import Setting, batched, indoor
from benchmarks.clients.timing import timed
from sparseconv import nn
from sparseconv.plan.plan_set import PlanSet

NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "unet": lambda: nn.UNet(6, 20),
    "minkunet18": lambda: nn.MinkUNet(6, 20, variant="18A"),
    "spunet": lambda: nn.SpUNet(6, 20),
}
CHANNELS, TURNS = 6, 3


def scenes_of(net: torch.nn.Module, setting: Setting) -> list[tuple[torch.Tensor, Any]]:
    """Features, and a grid that holds every plan of the network."""
    found = []
    for parts in indoor(setting):
        grid = PlanSet.of(net, sc.VoxelGrid(batched(parts))).grid
        found.append((torch.randn(len(grid), CHANNELS, device=setting.device), grid))
    return found


def measure(name: str, setting: Setting, repeats: int, backend: str) -> dict[str, Any]:
    """A row: steps and inference of one network, eager and compiled."""
    torch.manual_seed(0)
    net = NETWORKS[name]().to(setting.device)
    scenes = scenes_of(net, setting)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=backend)

    def forward(run: Callable[..., Any], scene: tuple[torch.Tensor, Any]) -> torch.Tensor:
        with torch.autocast(setting.device, torch.float16 if setting.device == "cuda" else torch.bfloat16):
            features: torch.Tensor = run(sc.SparseTensor(scene[1], scene[0])).features
        return features

    def step(run: Callable[..., Any], scene: tuple[torch.Tensor, Any]) -> None:
        net.zero_grad(set_to_none=True)
        forward(run, scene).float().square().mean().backward()

    row: dict[str, Any] = {"network": name, "voxels": [len(scene[0]) for scene in scenes]}
    for mode, call in (("step", step), ("inference", torch.no_grad()(forward))):
        net.train(mode == "step")
        began = time.perf_counter()
        for scene in scenes:
            call(compiled, scene)
        row[f"{mode}_compiling_s"] = round(time.perf_counter() - began, 1)
        turns = [[timed(partial(call, run), scenes, repeats)["ms"] for run in (net, compiled)] for _ in range(TURNS)]
        middle = [sorted(times)[TURNS // 2] for times in zip(*turns)]
        row[mode] = {"eager_ms": middle[0], "compiled_ms": middle[1], "turns": turns}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--network", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--reach", type=int, help="keep the cells that lie that near to a scan's middle")
    args = parser.parse_args()
    setting = Setting(args.data, args.data, args.device, reach=args.reach)
    words = ["python -m benchmarks.compiled --data DATA --json", args.json.name, "--network", *args.network]
    words += ["--device", args.device, "--backend", args.backend]
    words += [] if args.reach is None else ["--reach", str(args.reach)]
    facts = {**machine(args.device), "torch": torch.__version__, "command": " ".join(words)}
    rows = [measure(name, setting, args.repeats, args.backend) for name in args.network]
    args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    for row in rows:
        times = (f"{mode} {row[mode]['eager_ms']} -> {row[mode]['compiled_ms']}" for mode in ("step", "inference"))
        print(row["network"], *times)


if __name__ == "__main__":
    main()
