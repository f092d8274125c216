"""Facts for benchmarks and bug reports: machine, versions, clocks, and which backends can run."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: packages whose versions matter
NEEDED = ("sparseconv", "torch", "numpy", "triton", "triton-windows", "llvmlite")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
#: other libraries of this field
OTHERS = (
    "spconv",
    "spconv-cu126",
    "spconv-triton",
    "MinkowskiEngine",
    "torchsparse",
    "flex-gemm",
    "warpconvnet",
    "fvdb-core",
)
#: environment variables that change what runs, or how fast
VARIABLES = ("SPARSECONV_", "TRITON_", "CUDA_", "OMP_", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUPY_")


def facts(device: str) -> dict[str, Any]:
    """Facts about this machine for a device ``"cpu"`` or ``"cuda"``: time, versions, CPU or GPU.

    >>> found = facts("cpu")
    >>> found["packages"]["torch"] == torch.__version__, found["threads"] == torch.get_num_threads()
    (True, True)
    """
    import sparseconv

    found: dict[str, Any] = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: known for name in NEEDED + CUPY + OTHERS if (known := _version(name))},
    }
    found["packages"] |= {"sparseconv": sparseconv.__version__, "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        said = (output("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader") or "").splitlines()
        found["card"] = {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            **dict(zip(asked.split(","), (v.strip() for v in said[0].split(",")) if said else ())),
        }
    else:
        found["threads"] = torch.get_num_threads()
        found["capability"] = torch.backends.cpu.get_cpu_capability()
        found["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return found


def text() -> str:
    """Everything a bug report needs, as plain lines: ``sparseconv info``."""
    found = facts("cpu")
    packages = found["packages"]
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    lines = [
        f"sparseconv  {packages.pop('sparseconv')} in {Path(__file__).parent}",
        f"python      {found['python']} on {platform.platform()}",
        f"torch       {packages.pop('torch')}, {cuda}",
        f"cpu         {found['cpu']}, {found['cores']} cores, {found['capability']}",
        f"threads     {found['threads']} in torch",
    ]
    for n in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(n)
        driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={n}")
        lines.append(
            f"cuda:{n}      {gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
            f"{gpu.total_memory / 2**30:.0f} GiB, driver {driver or 'unknown'}"
        )
    if not torch.cuda.device_count():
        lines.append("gpu         none visible to torch")
    lines += [f"{name:<11} {packages.get(name, 'not installed')}" for name in ("numpy", "triton", "llvmlite")]
    cupy = [f"{name} {packages[name]}" for name in CUPY if name in packages]
    lines.append(f"cupy        {', '.join(cupy) or 'not installed'}")
    others = [f"{name} {packages[name]}" for name in OTHERS if name in packages]
    lines += [f"others      {', '.join(others)}"] * bool(others)
    lines += [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(VARIABLES)]
    for where in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        lines += ["", f"backends for a plan on {where}, in order of preference"]
        lines += [f"  {name:<22} {said}" for name, said in backends(torch.device(where)).items()]
    return "\n".join(lines)


def backends(device: torch.device) -> dict[str, str]:
    """Whether each backend can run a submanifold convolution of 32 channels: ``chosen``, ``yes``, or ``no`` and why.

    >>> "chosen" in backends(torch.device("cpu")).values()
    True
    """
    from sparseconv.backends.registry import BACKENDS, backend
    from sparseconv.geometry import VoxelGrid
    from sparseconv.plan import ConvolutionPlan

    found: dict[str, str] = {}
    try:
        grid = VoxelGrid(torch.zeros(1, 4, dtype=torch.int32, device=device))
        request = ConvolutionPlan(grid, 3).request(32, 32)
    except Exception as error:  # a report is needed most when something is broken
        return dict.fromkeys(BACKENDS, f"no: a plan cannot be made: {type(error).__name__}: {error}")
    for name in BACKENDS:
        try:
            refusal = backend(name).unsupported(request)
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        found[name] = f"no: {refusal}" if refusal else "yes" if "chosen" in found.values() else "chosen"
    return found


def output(*command: str) -> str | None:
    """The output of a command; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
