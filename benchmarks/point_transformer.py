"""Pointcept's own Point Transformer V3, unmodified under spconv's names, beside this library's.

    python -m benchmarks.point_transformer --pointcept DIR                # differences in fp64, option by option
    python -m benchmarks.point_transformer --pointcept DIR --time --device cuda --only theirs --library spconv
    python -m benchmarks.point_transformer --pointcept DIR --time --device cuda --only ours captured

``--pointcept`` is a checkout of Pointcept, which is no part of this project; addict must be installed. Weights are
drawn by a seed and loaded into both with ``strict=True``. `benchmarks.clients.transformers` says what stands in for
packages that are missing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sparseconv as sc
from benchmarks.clients.transformers import authors, kept_in_fp64
from sparseconv import nn
from sparseconv.gpu.launcher import await_compilers
from sparseconv.interop import spconv

#: edge of a voxel, in the unit of points
POINTS = 0.3
CURVES = ("z", "z-trans", "hilbert", "hilbert-trans")
SMALL: dict[str, Any] = {
    "order": CURVES, "stride": (2, 2, 2), "enc_depths": (1, 1, 2, 1), "enc_channels": (8, 16, 24, 32),
    "enc_num_head": (1, 2, 2, 4), "enc_patch_size": (48,) * 4, "dec_depths": (1, 2, 1), "dec_channels": (12, 16, 24),
    "dec_num_head": (2, 2, 4), "dec_patch_size": (48,) * 3,
}  # fmt: skip
WHOLE: dict[str, Any] = {"order": CURVES, "enc_patch_size": (1024,) * 5, "dec_patch_size": (1024,) * 4}
M3: dict[str, Any] = {
    "variant": "m3", "rope_base": 10, "enc_channels": (12, 12, 24, 36), "enc_num_head": (1, 2, 2, 3),
    "dec_channels": (12, 12, 24), "dec_num_head": (1, 2, 2),
}  # fmt: skip
#: name, options, voxels of each item, edge of the scene, training
CASES: tuple[tuple[str, dict[str, Any], tuple[int, ...], int, bool], ...] = (
    ("flash-attn, evaluation", SMALL, (700, 500), 24, False),
    ("flash-attn, training", SMALL, (700, 500), 24, True),
    ("an item shorter than a patch", SMALL, (700, 30), 24, True),
    ("without flash-attn", SMALL | {"enable_flash": False}, (700, 500), 24, False),
    ("relative positions, training", SMALL | {"enable_flash": False, "enable_rpe": True}, (700, 500), 24, True),
    ("norms behind", SMALL | {"pre_norm": False}, (700, 500), 24, False),
    ("strides of 4, no shuffling", SMALL | {"stride": (4, 2, 2), "shuffle_orders": False}, (700, 500), 24, False),
    ("encoder alone", SMALL | {"enc_mode": True}, (700, 500), 24, False),
    ("levels run out", SMALL | {"stride": (2, 4, 2)}, (20, 9), 3, False),
    ("m2, evaluation", SMALL | {"variant": "m2", "layer_scale": 0.3, "stride": (2, 3, 2)}, (700, 500), 24, False),
    ("m2, training", SMALL | {"variant": "m2", "layer_scale": 0.3}, (700, 30), 24, True),
    ("m3, evaluation", SMALL | M3 | {"layer_scale": 0.3, "stride": (2, 3, 2)}, (700, 500), 24, False),
    ("m3, training", SMALL | M3 | {"jitter_coords": 1.1, "rescale_coords": 1.2}, (700, 30), 24, True),
    ("m3, rotary on the way down alone", SMALL | M3 | {"dec_rope_enable": False}, (700, 500), 24, False),
    ("whole, 46.2 M parameters", WHOLE, (2500, 1800), 40, False),
)


def scene(counts: tuple[int, ...], edge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 4) distinct voxels and (N, 6) features in fp64."""
    gen = torch.Generator().manual_seed(0)
    coords = []
    for item, rows in enumerate(counts):
        cells = torch.randperm(edge**3, generator=gen)[:rows]
        coords.append(torch.stack([torch.full((rows,), item), cells // edge**2, cells // edge % edge, cells % edge], 1))
    return torch.cat(coords), torch.randn(sum(counts), 6, generator=gen, dtype=torch.float64)


def pair(kinds: dict[str, Any], options: dict[str, Any], training: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Theirs and ours with the same weights."""
    torch.manual_seed(0)
    asked = {key: value for key, value in options.items() if key != "variant"}
    theirs = kinds[options.get("variant", "m1")](
        6, **asked, drop_path=0.0, upcast_attention=False, upcast_softmax=False
    ).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in theirs.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.uniform_(0.5, 1.5)
    ours = nn.PointTransformerV3(6, **options, drop_path=0.0).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs.train(training), ours.train(training)


def given(coords: torch.Tensor, features: torch.Tensor) -> dict[str, torch.Tensor]:
    """A scene as Pointcept's models take it."""
    cells = coords[:, 1:].int()
    points = POINTS * cells.to(features.dtype)
    return {"feat": features, "grid_coord": cells, "coord": points, "batch": coords[:, 0].long()}


def differences(
    kinds: dict[str, Any], options: dict[str, Any], counts: tuple[int, ...], edge: int, training: bool
) -> list[float]:
    """Of the output, the input's gradient and the worst parameter's, each over the largest number (or norm)."""
    theirs, ours = pair(kinds, options, training)
    coords, features = scene(counts, edge)
    x1, x2 = features.clone().requires_grad_(), features.clone().requires_grad_()
    with kept_in_fp64():
        torch.manual_seed(1)
        point = theirs(given(coords, x1))
    torch.manual_seed(1)
    at = {"positions": POINTS * coords[:, 1:].double()} if options.get("variant") == "m3" else {}
    y = ours(sc.SparseTensor(sc.VoxelGrid(coords, len(counts)), x2), **at)
    want = point.feat
    got = y.features[y.grid.lookup(torch.cat([point.batch[:, None].int(), point.grid_coord.int()], 1))]
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view_as(want)
    names, mine = zip(*ours.named_parameters())
    asked = torch.autograd.grad((want * weight).sum(), [x1, *(theirs.get_parameter(name) for name in names)])
    found = torch.autograd.grad((got * weight).sum(), [x2, *mine])
    worst = 0.0
    for own, other in zip(found[1:], asked[1:], strict=True):
        grad = other.flatten(1, -2).permute(1, 2, 0) if other.ndim == 5 else other
        size = float(grad.norm())  # a bias before a norm has none but rounding's
        worst = max(worst, float((own - grad).norm()) / (size if size > 1e-9 else 1.0))
    pairs = (got.detach(), want.detach()), (found[0], asked[0])
    return [*(float((a - b).abs().max() / b.abs().max()) for a, b in pairs), worst]


def measured(call: Callable[[], Any], device: str, rounds: int = 20) -> tuple[float, float, float]:
    """The median time of a call in ms, and the peaks in GiB of what torch's tensors take of a card and of what torch
    holds of it, graphs included, all after five calls.

    What the first calls let be compiled beside them is there by then, as in all but the first minute of a training.
    """
    times = []
    for at in range(rounds + 5):
        if device == "cuda" and at == 3:
            await_compilers()
        if device == "cuda":
            torch.cuda.synchronize()
        if device == "cuda" and at == 5:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    peak, held = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device == "cuda" else (0, 0)
    return sorted(times[5:])[rounds // 2], peak / 2**30, held / 2**30


def times(kinds: dict[str, Any], device: str, voxels: int, rounds: int, only: list[str]) -> dict[str, float]:
    """A training step and an inference in ms on new scenes: theirs, ours, and ours captured.

    Under autocast, to fp16 on a GPU and to bf16 on a CPU.
    """
    gen = torch.Generator().manual_seed(0)
    scenes = []
    for _ in range(4):
        points = torch.nn.functional.normalize(torch.randn(4 * voxels, 3, generator=gen), dim=1)
        cells = torch.unique(((points + 1) * (voxels / 12.6) ** 0.5).int(), dim=0)
        cells = cells[torch.randperm(len(cells), generator=gen)]
        coords = torch.cat([torch.zeros(len(cells), 1, dtype=torch.int32), cells], 1).to(device)
        scenes.append((coords, torch.randn(len(coords), 6, generator=gen).to(device)))
    turn = iter(range(1 << 30))
    found: dict[str, float] = {"voxels": len(scenes[0][0])}
    for name in only:
        torch.manual_seed(0)
        asked = {"drop_path": 0.0, **WHOLE}
        made = kinds["m1"](6, **asked) if name == "theirs" else nn.PointTransformerV3(6, **asked)
        net: Any = made.to(device).train()
        net = nn.capture(net) if name == "captured" else net

        def call(coords: torch.Tensor, x: torch.Tensor, net: Any = net, name: str = name) -> torch.Tensor:
            y: torch.Tensor
            if name == "theirs":
                y = net(given(coords, x)).feat
            else:
                y = net(sc.SparseTensor(sc.VoxelGrid(coords), x)).features
            return y

        def step(net: Any = net, call: Callable[..., torch.Tensor] = call) -> None:
            net.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
                y = call(*scenes[next(turn) % len(scenes)])
            y.float().square().mean().backward()

        def inference(call: Callable[..., torch.Tensor] = call) -> None:
            with torch.no_grad(), torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
                call(*scenes[next(turn) % len(scenes)])

        found |= zip((f"{name} step", f"{name} step GiB", f"{name} step GiB held"), measured(step, device, rounds))
        print(f"{name} step {found[f'{name} step']:.2f}", flush=True)
        net.zero_grad(set_to_none=True)
        if name == "captured":  # the graphs of training go, as where a network is only used
            net = nn.capture(nn.release(net))
        net.eval()
        try:
            inference()
        except RuntimeError as error:  # spconv has no kernel for some layers outside of training
            print(f"{name} inference: {str(error).splitlines()[-1][:100]}", flush=True)
            for module in net.modules():
                module.training = module.training or type(module).__module__.startswith("spconv.")
            found[f"{name} inference by training's kernels"] = True
        names = (f"{name} inference", f"{name} inference GiB", f"{name} inference GiB held")
        found |= zip(names, measured(inference, device, rounds))
        del net, made, call, step, inference
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pointcept", type=Path, required=True)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--voxels", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=["theirs", "ours", "captured"], help="what is timed")
    parser.add_argument("--library", choices=("sparseconv", "spconv"), default="sparseconv", help="under theirs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.library == "sparseconv":
        spconv.install()
    kinds = authors(args.pointcept)
    found: dict[str, Any] = {}
    if args.time:
        found = times(kinds, args.device, args.voxels, args.rounds, args.only)
        for name, value in found.items():
            print(f"{name:24} {value:.2f}", flush=True)
    else:
        print(f"{'':32} output   input's gradient   worst parameter's")
        for name, options, counts, edge, training in CASES:
            found[name] = differences(kinds, options, counts, edge, training)
            print(f"{name:32} " + "            ".join(f"{value:.1e}" for value in found[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
