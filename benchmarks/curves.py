"""Losses of a training by graphs beside those of the same training without: a network of spconv's names on a scan.

    python -m benchmarks.curves --data DIR --json FILE
    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.curves --data DIR --json FILE

Each epoch goes over crops of an indoor scan, each turned about the vertical axis, scaled and cropped at random, so that
no two steps have one size. The labels are the voxels' heights, in eight parts. Both trainings see the same scenes in
the same order, with `torch.autocast`, GradScaler, AdamW, clipping, a moving average of the weights and, with several
ranks, DistributedDataParallel. A third training, eager again, says how far two eager runs lie apart.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

CLASSES = 8


def crops(file: Path, count: int, rank: int) -> list[np.ndarray]:
    """Voxels (N, 3) around points of a scan, as floats: other ones for each rank."""
    points = np.load(file)["coords"].astype(np.float64)
    rng = np.random.default_rng(rank)
    found: list[np.ndarray] = []
    while len(found) < count:
        centre = points[rng.integers(len(points))]
        near = points[(np.abs(points - centre) < (160, 160, 1000)).all(1)]
        if len(near) > 2000:
            found.append(near - centre)
    return found


def scene(points: np.ndarray, rng: np.random.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coordinates (N, 4), features (N, 3) and labels (N,) of a crop, turned, scaled and cropped at random."""
    angle, scale, size = rng.uniform(0, 2 * np.pi), rng.uniform(0.8, 1.25), rng.uniform(90, 160)
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    turned = points @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, scale]]).T
    cells = np.unique(np.floor(turned[(np.abs(turned[:, :2]) < size).all(1)]).astype(np.int64), axis=0)
    cells = cells[rng.permutation(len(cells))]
    height = (cells[:, 2] - cells[:, 2].min()) / max(1, np.ptp(cells[:, 2]))
    coords = np.concatenate([np.zeros((len(cells), 1), np.int64), cells - cells.min(0)], 1)
    features = torch.from_numpy(coords[:, 1:] / np.maximum(1, coords[:, 1:].max(0))).float() - 0.5
    labels = torch.from_numpy(np.minimum(height * CLASSES, CLASSES - 1)).long()
    return torch.from_numpy(coords).int().to(device), features.to(device), labels.to(device)


def network() -> torch.nn.Module:
    """A small U-Net of spconv's layers and torch's norms, as segmenters are written."""
    import spconv.pytorch as spconv

    def layer(kind: Any, c_in: int, c_out: int, size: int, **options: Any) -> torch.nn.Module:
        return spconv.SparseSequential(
            kind(c_in, c_out, size, bias=False, **options), torch.nn.BatchNorm1d(c_out), torch.nn.ReLU()
        )

    class Segmenter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = layer(spconv.SubMConv3d, 3, 32, 5, indice_key="stem")
            self.down = layer(spconv.SparseConv3d, 32, 64, 2, stride=2, indice_key="down")
            self.middle = layer(spconv.SubMConv3d, 64, 64, 3, indice_key="middle")
            self.up = layer(spconv.SparseInverseConv3d, 64, 32, 2, indice_key="down")
            self.last = spconv.SubMConv3d(64, CLASSES, 1)

        def forward(self, coords: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            shape = (coords[:, 1:].max(0).values + 1).tolist()
            x = self.stem(spconv.SparseConvTensor(features, coords, shape, 1))
            y = self.up(self.middle(self.down(x)))
            out: torch.Tensor = self.last(y.replace_feature(torch.cat((y.features, x.features), 1))).features
            return out

    return Segmenter()


def train(args: argparse.Namespace, graphs: bool, device: str, rank: int) -> tuple[list[float], str]:
    """The loss of each step, and what was captured."""
    import sparseconv as sc
    from sparseconv import nn

    torch.manual_seed(0)
    net = network().to(device)
    mean = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    if graphs:
        sc.accelerate(net)
    model = torch.nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0, growth_interval=50)
    kind, losses = getattr(torch, args.dtype), []
    parts = crops(args.data / "indoor_rooms_pcl_002.npz", args.crops, rank)
    for epoch in range(args.epochs):
        rng = np.random.default_rng((epoch, rank))
        for part in rng.permutation(len(parts)):
            coords, features, labels = scene(parts[part], rng, device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(torch.device(device).type, kind):
                logits = model(coords, features)
            loss = torch.nn.functional.cross_entropy(logits.float(), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            mean.update_parameters(net)
            losses.append(loss.detach())
    return torch.stack(losses).tolist(), nn.explain(net)


def apart(a: list[float], b: list[float], epochs: int) -> dict[str, Any]:
    """How far two curves lie apart: means of epochs, and the last of them as a part of the first loss."""
    first, second = (np.array(v).reshape(epochs, -1).mean(1) for v in (a, b))
    return {
        "epochs": [[round(float(v), 4) for v in pair] for pair in zip(first, second)],
        "largest": round(float(np.abs(first - second).max() / first[0]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--crops", type=int, default=60)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    args = parser.parse_args()
    from sparseconv.interop import spconv

    spconv.install()
    rank, device = int(os.environ.get("LOCAL_RANK", 0)), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    (eager, _), (graphs, said), (again, _) = (train(args, kind, device, rank) for kind in (False, True, False))
    report = {
        "card": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "command": f"python -m benchmarks.curves --epochs {args.epochs} --crops {args.crops} --dtype {args.dtype}",
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "graphs": apart(eager, graphs, args.epochs),
        "two_eager_runs": apart(eager, again, args.epochs),
        "explained": said,
    }
    if rank == 0:
        print(json.dumps(report, indent=1))
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
