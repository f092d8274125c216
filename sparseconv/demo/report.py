"""Tables for a terminal: what is installed, which backends can run, what a set of plans costs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from rich import box
from rich.table import Table

import sparseconv
from sparseconv.backends.registry import choose, refusals
from sparseconv.plan import ConvolutionPlan


@dataclass(frozen=True)
class PlanUse:
    """A plan in a network: what it is for, the widest layer that executes it, and how many layers share it."""

    name: str
    plan: ConvolutionPlan
    c_in: int
    c_out: int
    layers: int = 1


def new_table(title: str, *columns: str, words: int = 1) -> Table:
    """A table in the house's style; the first ``words`` columns are text, the others figures."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        header_style="dim",
        border_style="dim",
    )
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n < words else "right", overflow="fold")
    return table


def plans_table(uses: Sequence[PlanUse]) -> Table:
    """Voxels, pairs, memory of the map and of the work, and the chosen backend of each plan."""
    table = new_table("Plans", "plan", "voxels", "pairs", "/voxel", "widest", "layers", "MB", "+ work", words=1)
    serving = []
    for use in uses:
        plan, edges = use.plan, use.plan.kernel_map
        request = plan.request(use.c_in, use.c_out)
        chosen = choose(request, plan.backend)
        serving.append(chosen.name)
        rows = f"{edges.num_in:,}" if edges.num_in == edges.num_out else f"{edges.num_in:,} → {edges.num_out:,}"
        table.add_row(
            use.name,
            rows,
            f"{edges.num_pairs:,}",
            f"{edges.num_pairs / max(1, edges.num_out):.1f}",
            f"{use.c_in} → {use.c_out}",
            str(use.layers),
            f"{map_bytes(plan) / 1e6:.1f}",
            f"{chosen.workspace_bytes(request) / 1e6:.1f}",
        )
    if len(set(serving)) == 1:
        table.caption = f"backend of all: {serving[0]}"
    else:
        table.caption = "backends, by row: " + ", ".join(serving)
    return table


def map_bytes(plan: ConvolutionPlan) -> int:
    """Bytes of the kernel map's tensors that exist by now."""
    held = [value for value in plan.kernel_map.__dict__.values() if isinstance(value, (torch.Tensor, tuple))]
    tensors = [t for value in held for t in (value if isinstance(value, tuple) else (value,))]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def installed_table() -> Table:
    """The versions that matter, and the machine."""
    table = new_table("Installed", "what", "version", words=2)
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    rows = [
        ("sparseconv", sparseconv.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {cuda}"),
        ("numpy", _version("numpy")),
        ("triton", _version("triton", "triton-windows")),
        ("cupy", _version("cupy-cuda13x", "cupy-cuda12x", "cupy")),
        ("llvmlite", _version("llvmlite")),
        ("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"),
    ]
    for n in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(n)
        rows.append(
            (
                f"cuda:{n}",
                f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 1e9:.0f} GB",
            )
        )
    if not torch.cuda.device_count():
        rows.append(("gpu", "none that torch can see"))
    for row in rows:
        table.add_row(*row)
    return table


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return f"{version(package)}" + (f" ({package})" if package != packages[0] or len(packages) > 2 else "")
        except PackageNotFoundError:
            continue
    return "not installed"


def backends_table(device: torch.device) -> Table:
    """What each backend says to a submanifold convolution of 32 channels on this device, in the order of asking."""
    table = new_table(f"Backends for a plan on {device}", "backend", "can run", "why not", words=3)
    grid = sparseconv.VoxelGrid(torch.zeros(1, 4, dtype=torch.int32, device=device))
    request = sparseconv.ConvolutionPlan(grid, 3).request(32, 32)
    first = True
    for name, sentence in refusals(request).items():
        verdict = "no" if sentence else "chosen" if first else "yes"
        first = first and bool(sentence)
        table.add_row(name, verdict, sentence or "")
    return table
