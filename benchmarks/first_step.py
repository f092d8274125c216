"""How long the first training step of a process takes, from an empty cache and from one that another process filled.

    python -m benchmarks.first_step --clients DIR --data DIR --json FILE

The clients are those of `benchmarks.clients`, unmodified, under this library's names for spconv, and this library's own
U-Net and MinkUNet on scans of the first. Every run is a process of its own. Its seconds begin after its imports, when
the voxels lie on the host, and end when the card has done the step: the context of the card, the network, and all that
is compiled are in them. A cold run has an empty cache of Triton's; a warm one that of the run before it. Runs are
printed as they end; none begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

#: steps of a run: the first, those that a capture needs, and some after it
STEPS = 6


class Run(NamedTuple):
    """One process, or with ``warm`` two, one after the other."""

    client: str
    accelerated: bool
    cores: int  # 0: all
    warm: bool


#: the most important first
RUNS = (
    Run("spunet", False, 0, True),
    Run("second", False, 0, True),
    Run("unet", False, 0, True),
    Run("minkunet", False, 0, False),
    Run("spunet", True, 0, True),
    Run("second", True, 0, True),
    Run("spunet", False, 2, False),
    Run("second", False, 2, False),
)


def child(args: argparse.Namespace) -> None:
    """One run: prints a line of JSON."""
    began = time.perf_counter()
    import importlib
    import warnings

    import torch

    from benchmarks.clients.networks import make
    from benchmarks.clients.scenes import Setting, loss_of
    from sparseconv import nn
    from sparseconv.interop import spconv

    spconv.install()
    constants: Any = importlib.import_module("spconv.constants")
    constants.SPCONV_ALLOW_TF32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    warnings.filterwarnings("ignore")
    own = {"unet": nn.UNet, "minkunet": nn.MinkUNet}.get(args.child)
    client = make("spunet" if own else args.child, Setting(args.clients, args.data, "cpu", scans=2))
    if own:
        client = client._replace(net=own(client.scenes[0][0].shape[1], 20), call=call_own)
    compiled, found = listen()
    ready = time.perf_counter()
    torch.zeros(1, device="cuda").item()
    context = time.perf_counter()
    net = client.net.cuda()
    if args.accelerate:
        import sparseconv

        sparseconv.accelerate(net)
    ends, here = [], []
    for number in range(STEPS):
        scene = tuple(t.cuda() for t in client.scenes[number % 2])
        net.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            y = client.call(net, scene)
        loss_of(y).backward()
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        here.append(len(compiled))
    row = {
        "imports_and_voxels_s": round(ready - began, 2),
        "first_step_s": round(ends[0] - ready, 2),
        "of_which_context_s": round(context - ready, 2),
        "later_steps_s": [round(b - a, 3) for a, b in itertools.pairwise(ends)],
        "compiled_here": here,
        "found_in_cache": len(found),
        "compiled_beside": beside(),
        "met": compiled,
        "card": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(row), flush=True)


def call_own(net: Any, scene: tuple[Any, ...]) -> Any:
    """A network of this library on features (N, C) and voxels (N, 3)."""
    import torch

    from sparseconv import SparseTensor, VoxelGrid

    coords = torch.nn.functional.pad(scene[1].int(), (1, 0))
    return net(SparseTensor(VoxelGrid(coords), scene[0])).features


def listen() -> tuple[list[str], list[str]]:
    """Names of kernels that this process compiles, and of those that it finds in Triton's cache, as it does so."""
    from triton import knobs

    compiled: list[str] = []
    found: list[str] = []

    def note(src: Any, cache_hit: bool, **_: Any) -> None:
        told = f"{src.name} {list(src.constants.values())}"
        (found if cache_hit else compiled).append(told[:300])

    knobs.compilation.listener = note
    return compiled, found


def beside() -> int:
    """Kernels that other processes compiled for this one."""
    try:
        from sparseconv.gpu.launcher import compilers_for
    except ImportError:  # before there were any
        return 0
    pool = compilers_for(0)
    return 0 if pool is None else pool.compiled


def start(args: argparse.Namespace, run: Run, cache: str) -> dict[str, Any]:
    """What a run says, or what became of it."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--child", run.client]
    command += ["--clients", str(args.clients), "--data", str(args.data)]
    command += ["--accelerate"] if run.accelerated else []
    if run.cores:
        some = sorted(os.sched_getaffinity(0))[: run.cores]
        command = ["taskset", "-c", ",".join(map(str, some)), *command]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"not done within {args.limit} s"}
    took = round(time.perf_counter() - began, 1)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"error": err.strip()[-800:], "process_s": took}
    return {**json.loads(lines[-1]), "process_s": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, default=Path("first_step.json"))
    parser.add_argument("--limit", type=float, default=90, help="seconds of one process")
    parser.add_argument("--seconds", type=float, default=150, help="seconds after which no run begins")
    parser.add_argument("--only", nargs="+", help="runs by their names: spunet, spunet-accelerated, spunet-2cores, ...")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--accelerate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    began, rows = time.perf_counter(), []
    for run in RUNS:
        name = run.client + "-accelerated" * run.accelerated + f"-{run.cores}cores" * bool(run.cores)
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm")[: 1 + run.warm]:
                if time.perf_counter() - began > args.seconds:
                    continue
                row = {"run": name, "cache": kind, **start(args, run, cache)}
                rows.append(row)
                print(json.dumps(row), flush=True)
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
