"""Train a sparse U-Net on tiles of a real volume, hold tiles out, draw the curves, stop, resume, compare."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv import nn
from sparseconv.plan import PlanSet

#: of the curves: blue and vermilion of Okabe and Ito's set, as in the library's own pictures
COLORS = ("#0072B2", "#D55E00")


@dataclass
class Tile:
    """A part of a scene: its voxels, with all their plans, and a label for each."""

    x: sc.SparseTensor
    labels: torch.Tensor


@dataclass
class Task:
    """Tiles to train on and tiles that are only ever looked at, the names of the classes, and the score to reach."""

    name: str
    train: list[Tile]
    held_out: list[Tile]
    classes: list[str]
    target: float


def tile(coords: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> Tile:
    """coords (N, 3), features (N, C), labels (N,) -> a tile."""
    coords = torch.cat([torch.zeros(len(coords), 1, dtype=coords.dtype), coords], 1)
    return Tile(sc.SparseTensor(sc.VoxelGrid(coords, 1), features.float()), labels.long())


def network(task: Task, seed: int = 0) -> nn.UNet:
    torch.manual_seed(seed)
    return nn.UNet(task.train[0].x.channels, len(task.classes), channels=(16, 32, 64))


class Training:
    """Everything that a checkpoint must hold: network, optimizer, schedule, step."""

    def __init__(self, task: Task, steps: int, rank: int = 0, world: int = 1) -> None:
        self.task, self.steps, self.rank, self.world = task, steps, rank, world
        self.net = network(task)
        if world > 1:
            self.net = nn.SyncBatchNorm.convert(self.net)
        self.model = torch.nn.parallel.DistributedDataParallel(self.net) if world > 1 else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), weight_decay=0.02)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=steps)
        counts = torch.bincount(torch.cat([t.labels for t in task.train]), minlength=len(task.classes)).float()
        self.weight = (counts.sum() / counts.clamp_min(1)).sqrt()
        self.step = 0
        self.losses: list[float] = []
        self.scores: list[tuple[int, float, float]] = []

    def run(self, until: int, every: int) -> None:
        while self.step < until:
            self.step += 1
            at = self.task.train[((self.step - 1) * self.world + self.rank) % len(self.task.train)]
            self.model.train()
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(at.x).features, at.labels, self.weight)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.losses.append(loss.item())
            if self.step % every == 0 or self.step == self.steps:
                self.scores.append((self.step, score(self.net, self.task.train), score(self.net, self.task.held_out)))

    def state(self) -> dict:
        parts = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}
        return {name: part.state_dict() for name, part in parts.items()} | {
            "step": self.step,
            "losses": list(self.losses),
            "scores": list(self.scores),
        }

    def restore(self, state: dict) -> None:
        for name in ("net", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.losses, self.scores = state["step"], list(state["losses"]), list(state["scores"])


@torch.no_grad()
def score(net: torch.nn.Module, tiles: list[Tile]) -> float:
    """The mean over classes of intersection over union."""
    net.eval()
    both = union = torch.zeros(())
    for at in tiles:
        y = net(at.x).features
        hit = torch.nn.functional.one_hot(y.argmax(1), y.shape[1])
        want = torch.nn.functional.one_hot(at.labels, y.shape[1])
        both, union = both + (hit & want).sum(0), union + (hit | want).sum(0)
    return float((both / union.clamp_min(1)).mean())


def train(task: Task, steps: int, output: Path, rank: int = 0, world: int = 1) -> dict:
    """Train, resume from halfway in a second run, compare the two bit by bit, write curves and figures."""
    start = time.perf_counter()
    every = max(1, steps // 8)
    for at in (*task.train, *task.held_out):
        PlanSet.of(network(task), at.x.grid)
    ready = time.perf_counter() - start
    whole = Training(task, steps, rank, world)
    whole.run(steps // 2, every)
    path = output / f"{task.name}_halfway.pth"
    if rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        torch.save(whole.state(), path)
    if world > 1:
        dist.barrier()
    whole.run(steps, every)
    spent = time.perf_counter() - start
    again = Training(task, steps, rank, world)
    again.restore(torch.load(path, weights_only=True))
    if world > 1:
        dist.barrier()
    if rank == 0:
        path.unlink()
    again.run(steps, every)
    equal = all(torch.equal(a, b) for a, b in zip(whole.net.state_dict().values(), again.net.state_dict().values()))
    result = {
        "task": task.name,
        "processes": world,
        "voxels": [sum(len(t.labels) for t in tiles) for tiles in (task.train, task.held_out)],
        "steps": steps,
        "seconds": round(spent, 1),
        "seconds_for_plans": round(ready, 2),
        "train_miou": round(whole.scores[-1][1], 3),
        "held_out_miou": round(whole.scores[-1][2], 3),
        "target": task.target,
        "resumed_equals": equal and whole.losses == again.losses,
    }
    if rank == 0:
        draw(task, whole, output / f"{task.name}.png")
        (output / f"{task.name}.json").write_text(json.dumps(result, indent=2))
        print(json.dumps(result))
    return result


def draw(task: Task, run: Training, path: Path) -> None:
    """Loss and scores over the steps."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes in (left, right):
        axes.set_prop_cycle(color=COLORS)
    left.plot(range(1, len(run.losses) + 1), run.losses, lw=1)
    left.set(xlabel="step", ylabel="cross-entropy", title=task.name.replace("_", " "), yscale="log")
    steps, seen, held = zip(*run.scores)
    right.plot(steps, seen, "o-", label="trained on")
    right.plot(steps, held, "s-", label="held out")
    right.axhline(task.target, color="gray", ls=":", label="target")
    right.set(xlabel="step", ylabel="mean IoU", ylim=(0, 1))
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def options(
    text: str, steps: int | None = None, millimetres: float | None = None, archive: str = ""
) -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if archive:
        parser.add_argument("archive", type=Path, help=f"source distribution of the package, {archive}")
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    if millimetres is not None:
        parser.add_argument("--millimetres", type=type(millimetres), default=millimetres, help="edge of a voxel")
    return parser.parse_args()


def reached(found: dict) -> bool:
    """Whether the held-out tiles reach the score, and a resumed run the same bits."""
    return found["held_out_miou"] >= found["target"] and found["resumed_equals"]
