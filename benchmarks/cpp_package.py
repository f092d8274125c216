"""A packaged network in C++ beside the same network in Python, in turns: ``examples/cpp``, with a record.

    python -m benchmarks.cpp_package --out FILE.json [--device cpu] [--network unet] [--rounds 3] [--repeat 500]

It builds ``run_package`` with CMake, and for each network and scan a package, as ``examples/cpp/make.py`` does. A round
is the calls of Python, then a new process of C++; each time is a round's median in ms, of calls that wait for the card.
On a card Python's is `nn.capture`, and C++ must have its bits. On a CPU it is the program that was packaged, and C++ is
equal to rounding. ``cpp_over_python`` is of the medians of all rounds. ``--folder`` keeps what is built.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.layers.machine import machine
from sparseconv.bench.report import write
from sparseconv.export import CPP

EXAMPLE = ROOT / "examples" / "cpp"
UNCOUNTED = 20
#: beams of a scan and points around of each
SCANS = {"cuda": ((24, 240), (64, 2048)), "cpu": ((24, 240),)}


def example() -> Any:
    """``examples/cpp/make.py`` as a module."""
    spec: Any = importlib.util.spec_from_file_location("cpp_make", EXAMPLE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said_by(*command: Any, codes: tuple[int, ...] = (0,)) -> str:
    """What a program said. Raises RuntimeError where it ends with another code."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in codes:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def built(folder: Path) -> Path:
    """The program ``run_package``."""
    options = ["-DCMAKE_PREFIX_PATH=" + torch.utils.cmake_prefix_path, f"-DSPARSECONV_CPP={CPP}"]
    more = ["-G", "Ninja"] if shutil.which("ninja") else []
    said_by("cmake", "-S", EXAMPLE, "-B", folder, *options, *more)
    said_by("cmake", "--build", folder, "-j", 2)
    return folder / "run_package"


def read(said: str) -> dict[str, Any]:
    """What ``run_package`` said: voxels, the median time, and whether its results are those of the file."""
    voxels = re.search(r"^(\d+) voxels$", said, re.MULTILINE)
    time = re.search(r"^network: (\S+) ms, the median of (\d+)$", said, re.MULTILINE)
    verdict = re.search(r"^(equal to what|not what) was expected$", said, re.MULTILINE)
    if voxels is None or time is None or verdict is None:
        raise RuntimeError(f"run_package said something else: {said[-500:]}")
    results = len(re.findall(r"^result \d+ .*: off by ", said, re.MULTILINE))
    found = {"voxels": int(voxels[1]), "ms": float(time[1]), "calls": int(time[2]), "results": results}
    return {**found, "is_equal": verdict[1] == "equal to what"}


def measure(program: Path, name: str, scan: tuple[int, int], card: bool, rounds: int, repeat: int) -> dict[str, Any]:
    """A network's row."""
    make, (beams, around) = example(), scan
    made = make.write(name, program.parent / f"{name}_{beams}", beams, around, 0, card)
    _, results = make.median(made.call, UNCOUNTED if card else 1, card)  # a captured network begins eagerly
    torch.save(results, made.files[-1])
    python, cpp = [], []
    for _ in range(rounds):
        python.append(make.median(made.call, repeat, card)[0])
        said = said_by(program, *made.files, *made.options, "--repeat", repeat, codes=(0, 1))
        cpp.append(read(said))
    facts = {"network": name, "beams": beams, "around": around, "voxels": cpp[0]["voxels"], "results": len(results)}
    times = {"python_ms": python, "cpp_ms": [found["ms"] for found in cpp]}
    medians = {key.replace("_ms", "_median_ms"): statistics.median(value) for key, value in times.items()}
    ratio = medians["cpp_median_ms"] / medians["python_median_ms"]
    equal = all(found["is_equal"] for found in cpp)
    return {**facts, **times, **medians, "cpp_over_python": ratio, "bits_equal" if card else "equal_to_rounding": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--network", nargs="+", choices=("unet", "encoder"), default=["unet", "encoder"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    card, rows = args.device == "cuda", []
    facts = machine(args.device) | {"threads": torch.get_num_threads()}
    python = "nn.capture" if card else "the exported program"
    with TemporaryDirectory() as folder:
        program = built((args.folder or Path(folder)).resolve())
        for name in args.network:
            for scan in SCANS[args.device]:
                row = measure(program, name, scan, card, args.rounds, args.repeat)
                rows.append(row)
                times = f"{python} {row['python_median_ms']:.3f} ms, C++ {row['cpp_median_ms']:.3f}"
                equal = "yes" if row.get("bits_equal", row.get("equal_to_rounding")) else "NO"
                print(f"{name}, {row['voxels']} voxels: {times}, {row['cpp_over_python']:.2f} of it; equal: {equal}")
                write(args.out, facts, rows, version="cpp_package", python=python, repeat=args.repeat)
    return int(not all(row.get("bits_equal", row.get("equal_to_rounding")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
