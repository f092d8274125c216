"""What a figure depends on: machine, versions, clocks."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES: tuple[str, ...] = (
    "sparseconv",
    "torch",
    "triton",
    "numpy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "spconv",
    "spconv-cu126",
)
PACKAGES += ("spconv-triton", "MinkowskiEngine", "torchsparse", "flex-gemm", "warpconvnet", "fvdb-core")
#: facts that are another at each look
CHANGING = ("when", "load", "clocks.sm", "clocks.mem", "temperature.gpu")


def facts(device: str) -> dict[str, Any]:
    """Facts about this machine, for a device ``"cpu"`` or ``"cuda"``."""
    import torch

    import sparseconv

    found: dict[str, Any] = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES if _version(name)},
    }
    found["packages"].setdefault("sparseconv", sparseconv.__version__)
    found["revision"] = revision(Path(__file__).parent)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        said = (_output("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader") or "").splitlines()
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


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The facts in which two machines differ, but for those that change while one works.

    >>> differing({"cpu": "a", "load": 0.1, "card": {"name": "x"}}, {"cpu": "a", "load": 3.0, "card": {"name": "y"}})
    ['name']
    """
    flat = [{k: v for part in (found, found.get("card", {})) for k, v in part.items()} for found in (one, other)]
    names = dict.fromkeys(name for found in flat for name in found if name != "card" and name not in CHANGING)
    return [name for name in names if flat[0].get(name) != flat[1].get(name)]


def revision(folder: Path) -> str | None:
    """The commit of a folder's repository, with "-dirty" behind it where files differ from it; None without one."""
    return _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")


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


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
