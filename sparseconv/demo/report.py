"""Tables for a terminal: what a set of plans costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table

from sparseconv.backends.registry import choose
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
