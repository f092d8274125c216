"""Convolution, bias, residual and activation in one store, beside one after the other as torch runs them.

    python -m benchmarks.fused [--json FILE] [--seconds 0.3] [--channels 16 32 64 128 256] [--compile-only]

*separate*: ``activation(plan.execute(x, w) + bias + residual)``. *bias inside*: the bias is given to ``execute``.
Values are compared with the separate sequence in fp32 before anything is timed. Submanifold 3x3x3, fp16, medians in ms;
the ways take turns. *Step* is forward and all four gradients. These are times of the device: work is queued ahead of
it, and what the host needs for a call does not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sparseconv as sc
import sparseconv.pointwise as pw
from benchmarks.pointwise import facts, in_turns
from sparseconv.bench import cases

SCENES = {
    "shell_512": (16, 32, 64, 128),
    "lidar_ouster_os1_3sweeps_005": (16, 32, 64, 128, 256),
    "indoor_rooms_pcl_002": (32, 64, 256),
}
ACTIVATIONS = {"relu": (pw.relu, torch.relu), "gelu": (pw.gelu, torch.nn.functional.gelu)}
Tensors = list[torch.Tensor]


def ways(plan: sc.ConvolutionPlan, activation: str) -> dict[str, Callable[..., torch.Tensor]]:
    """The three ways to activation(x * w + bias + residual)."""
    ours, torchs = ACTIVATIONS[activation]
    return {
        "fused": lambda x, w, b, r: plan.execute(x, w, b, residual=r, epilogue=ours),
        "separate": lambda x, w, b, r: torchs(plan.execute(x, w) + b + r),
        "bias inside": lambda x, w, b, r: torchs(plan.execute(x, w, b) + r),
    }


def operands(plan: sc.ConvolutionPlan, channels: int) -> Tensors:
    torch.manual_seed(0)
    x, residual = (torch.randn(len(plan.source), channels, device="cuda", dtype=torch.float16) for _ in range(2))
    weight = torch.randn(plan.num_taps, channels, channels, device="cuda", dtype=torch.float16)
    bias = torch.randn(channels, device="cuda", dtype=torch.float16)
    return [x, weight / (plan.num_taps * channels) ** 0.5, bias, residual]


def measure(plan: sc.ConvolutionPlan, channels: int, activation: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of each way, forward without gradients and step, and how many times as fast fused is."""
    tensors = operands(plan, channels)
    found = ways(plan, activation)
    with torch.no_grad():
        exact = found["separate"](*(t.float() for t in tensors))
        error = float((found["fused"](*tensors).float() - exact).abs().max() / exact.square().mean().sqrt())
    if not error < 1e-2:
        return {"error": error, "reason": "wrong values: not timed"}
    leaves = [t.detach().requires_grad_() for t in tensors]
    seed = torch.randn_like(tensors[3])

    def forward(way: str) -> None:
        with torch.no_grad():
            found[way](*tensors)

    def step(way: str) -> None:
        torch.autograd.grad(found[way](*leaves), leaves, seed)

    line: dict[str, Any] = {"error": error}
    for name, run, spin in (("forward", forward, 2_000_000), ("step", step, 10_000_000)):
        times = in_turns({way: partial(run, way) for way in found}, seconds, spin)
        line[name] = {**times, "times_as_fast": times["separate"] / times["fused"]}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--channels", type=int, nargs="*", default=None)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"facts": facts(), "cases": {}}
    print(f"{'':46}{'fused':>9}{'separate':>10}{'bias in':>9}{'':8}{'fused':>9}{'separate':>10}{'bias in':>9}")
    for scene, widths in SCENES.items():
        reason = cases.missing(scene)
        if reason is not None:
            report["cases"][scene] = {"reason": reason}
            print(f"{scene:46}{reason}")
            continue
        plan = sc.ConvolutionPlan(sc.VoxelGrid(cases.coordinates(scene, "cuda")), 3)
        for channels in widths:
            if options.channels and channels not in options.channels:
                continue
            for activation in ACTIVATIONS:
                name = f"{scene}, C {channels}, {activation}"
                line = measure(plan, channels, activation, 1e-3 if options.compile_only else options.seconds)
                report["cases"][name] = line
                if "reason" in line:
                    print(f"{name:46}{line['reason']} (error {line['error']:.1e})")
                    continue
                parts = [
                    f"{t['fused']:9.4f}{t['separate']:10.4f}{t['bias inside']:9.4f}{t['times_as_fast']:7.2f}x"
                    for t in (line["forward"], line["step"])
                ]
                print(f"{name:46}{''.join(parts)}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
