"""The command: ``python -m benchmarks.clients``."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

import benchmarks.clients
from benchmarks.clients.equality import equal
from benchmarks.clients.measuring import measure
from benchmarks.clients.networks import CLIENTS, SMALL
from benchmarks.clients.scenes import Setting


def machine(device: str) -> dict[str, Any]:
    """The GPU, or the CPU with its instructions and threads."""
    if device == "cuda":
        return {"card": torch.cuda.get_device_name()}
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": names[0].partition(":")[2].strip(), "capability": capability, "threads": torch.get_num_threads()}


def _spelled(args: argparse.Namespace) -> list[str]:
    """The arguments of a run, folders by what they hold."""
    words = ["--library", args.library, "--clients", "CLIENTS", "--data", "DATA"]
    words += [] if args.json is None else ["--json", args.json.name]
    words += ["--device", "cpu"] if args.device == "cpu" else []
    words += [f"--{flag}" for flag in ("accelerate", "check", "busy", "compiled") if getattr(args, flag)]
    words += [] if args.reach is None else ["--reach", str(args.reach)]
    words += ["--client", *args.client]
    if args.equal is not None:
        return [*words, "--equal", args.equal.name]
    return [*words, "--dtype", *args.dtype, "--repeats", str(args.repeats)]


def arguments() -> argparse.Namespace:
    about = benchmarks.clients.__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("spconv", "sparseconv"), required=True)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--equal", type=Path, metavar="FILE")
    parser.add_argument("--client", nargs="+", choices=list(CLIENTS), help="three of them; with --equal all small ones")
    parser.add_argument("--dtype", nargs="+", choices=("fp16", "bf16", "tf32", "fp32"), default=["fp16"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--reach", type=int, help="keep the cells that lie that near to a scan's middle")
    parser.add_argument("--debug", action="store_true", help="say where a capture failed")
    args = parser.parse_args()
    if args.equal is None and args.json is None:
        parser.error("give --json FILE for times, or --equal FILE for values")
    if args.equal is not None and args.device != "cpu":
        parser.error("--equal compares on the CPU: give --device cpu, too")
    if args.compiled and (args.accelerate or args.library == "spconv"):
        parser.error("--compiled measures this library's names without --accelerate")
    args.client = args.client or list(SMALL if args.equal else SMALL[:3])
    return args


def main() -> None:
    args = arguments()
    if args.debug:
        logging.basicConfig(level=logging.DEBUG)
    warnings.filterwarnings("ignore")
    if args.library == "sparseconv":
        from sparseconv.interop import spconv

        spconv.install()
    elif args.device == "cpu":
        from benchmarks.layers.peers import load_spconv

        load_spconv()
    constants: Any = importlib.import_module("spconv.constants")
    constants.SPCONV_ALLOW_TF32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    facts = {
        **machine(args.device),
        "torch": torch.__version__,
        "command": " ".join(["python -m benchmarks.clients", *_spelled(args)]),
    }
    if args.equal is not None:
        facts["threads"] = 1
        rows = equal(args.equal, args.client, Setting(args.clients, args.data, "cpu", reach=args.reach), args.library)
        if args.json is not None:
            args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        return
    rows = []
    for name in args.client:
        for dtype in args.dtype:
            try:
                row = measure(args, name, dtype)
            except Exception as error:
                if args.repeats < 5:
                    raise
                row = {"client": name, "dtype": dtype, "library": args.library, "error": repr(error)[:400]}
            print(json.dumps(row), flush=True)
            rows.append(row)
            args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
            if args.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
