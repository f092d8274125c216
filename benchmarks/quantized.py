"""What 8 bits cost in accuracy: networks are trained, calibrated on what they learnt from, and scored both ways.

    python -m benchmarks.quantized [demo] [brain_tissues] [frog_tissues] [cortex_folds] [--steps N] [--json FILE] ...

``demo`` is the network of ``sparseconv demo`` with its Dice on the front half of the brain. The others are examples of
``examples/anatomy`` with the mean IoU of their held-out tiles. Exits with 1 where 8 bits lose more than 0.005 of a
score. Needs the packages of the demonstration.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sparseconv as sc
from benchmarks import ROOT

#: of a score that 8 bits may lose
LIMIT = 0.005


def demo(steps: int, millimetres: float, **options: Any) -> dict[str, float]:
    """The demonstration's network: mean Dice on the half that it never saw."""
    from sparseconv.demo.learn import Scan, Segmenter, dice, scan, train
    from sparseconv.demo.volume import load_brain

    brain = load_brain(millimetres)
    in_front, _ = brain.front()
    whole = scan(brain, 0.1, torch.Generator().manual_seed(1))
    back, front = (Scan(brain.part(m), whole.brightness[m]) for m in (~in_front, in_front))
    torch.manual_seed(0)
    model = Segmenter(back)
    train(model, back.brain, 0.1, steps, torch.Generator().manual_seed(0), lambda course: None)
    x, seen = (sc.SparseTensor(s.brain.grid, model.features(s.brightness)) for s in (front, back))

    def score(net: torch.nn.Module) -> float:
        figures = dice(net(x).features.argmax(1), front.brain.labels)
        return sum(figures) / len(figures)

    return compared(model.net.eval(), [seen], score, **options)


def example(name: str, steps: int, millimetres: float, **options: Any) -> dict[str, float]:
    """An example of ``examples/anatomy``: mean IoU of the tiles that it never saw."""
    sys.path.insert(0, str(ROOT / "examples" / "anatomy"))
    loop = importlib.import_module("loop")
    make = importlib.import_module(name).task
    task = make(millimetres) if name == "brain_tissues" else make()
    run = loop.Training(task, steps)
    run.run(steps, steps)
    seen = [tile.x for tile in task.train]
    return compared(run.net.eval(), seen, lambda net: loop.score(net, task.held_out), **options)


@torch.no_grad()
def compared(net: torch.nn.Module, scenes: list[sc.SparseTensor], score: Any, **options: Any) -> dict[str, float]:
    """The score of a network, and of its 8-bit copies."""
    scores = {"fp32": score(net)}
    for dtype in ("int8", "fp8"):
        scores[dtype] = score(sc.quantize(net, scenes, dtype=dtype, **options))
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["demo", "brain_tissues"], help="default: the first two")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--millimetres", type=float, default=4, help="edge of a voxel")
    parser.add_argument("--percentile", type=float, help="of activations that scales cover")
    parser.add_argument("--json", type=Path, help="write the scores here")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name in args.networks:
        start = time.perf_counter()
        size = args.millimetres if name == "demo" else int(args.millimetres)
        made = demo if name == "demo" else lambda *given, name=name, **more: example(name, *given, **more)
        found[name] = made(args.steps, size, percentile=args.percentile)
        lost = {kind: found[name]["fp32"] - value for kind, value in found[name].items() if kind != "fp32"}
        found[name]["seconds"] = round(time.perf_counter() - start, 1)
        words = ", ".join(f"{kind} {found[name][kind]:.4f} (loses {loss:+.4f})" for kind, loss in lost.items())
        print(f"{name}: fp32 {found[name]['fp32']:.4f}, {words}; {found[name]['seconds']} s", flush=True)
        found[name]["lost"] = max(lost.values())
        if args.json:
            settings = {"steps": args.steps, "millimetres": args.millimetres, "percentile": args.percentile}
            args.json.write_text(json.dumps({"settings": settings, "scores": found}, indent=1) + "\n")
    return int(any(one["lost"] > LIMIT for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
