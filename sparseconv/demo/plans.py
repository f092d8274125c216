"""Which plans a network uses, and for what."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.demo.report import PlanUse
from sparseconv.geometry import VoxelGrid
from sparseconv.nn.convolution import ConvolutionModule
from sparseconv.plan import ConvolutionPlan
from sparseconv.tensor import SparseTensor


def plans_in_use(net: torch.nn.Module, x: SparseTensor, unit: str = "") -> list[PlanUse]:
    """Run the network once, without gradients, and tell its plans in the order of their first use."""
    calls: list[tuple[ConvolutionModule, VoxelGrid, VoxelGrid]] = []

    def note(module: Any, args: tuple, output: SparseTensor) -> None:
        calls.append((module, args[0].grid, output.grid))

    layers = [module for module in net.modules() if isinstance(module, ConvolutionModule)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    was_training = net.training
    try:
        with torch.no_grad():
            net.eval()(x)
    finally:
        net.train(was_training)
        for handle in handles:
            handle.remove()
    uses: dict[int, PlanUse] = {}
    for layer, source, target in calls:
        plan = _plan(layer, source, target)
        kept = uses.get(id(plan))
        c_in, c_out = layer.in_channels, layer.out_channels
        if kept is not None and kept.c_in * kept.c_out > c_in * c_out:
            c_in, c_out = kept.c_in, kept.c_out
        uses[id(plan)] = PlanUse(_name(plan, unit), plan, c_in, c_out, 1 if kept is None else kept.layers + 1)
    return list(uses.values())


def _plan(layer: ConvolutionModule, source: VoxelGrid, target: VoxelGrid) -> ConvolutionPlan:
    """The plan that a layer found through the grids it met."""
    for plan in [*source.derived.values(), *target.derived.values()]:
        if not isinstance(plan, ConvolutionPlan) or plan.source is not source or plan.target is not target:
            continue
        if plan.num_taps == layer.geometry.num_taps and plan.groups == layer.groups:
            return plan
    raise LookupError(f"no plan from {source} to {target} is kept with either")


def _name(plan: ConvolutionPlan, unit: str) -> str:
    """Such as "3 mm 3×3×3" or "3 → 6 mm 2×2×2"."""
    window = "×".join(map(str, plan.kernel_size)) if plan.kernel_size else f"{plan.num_taps} taps"
    sizes = [f"{plan.source.voxel_size[0]:g}"]
    if plan.target is not plan.source:
        sizes.append(f"{plan.target.voxel_size[0]:g}")
    return f"{' → '.join(sizes)}{' ' + unit if unit else ''} {window}"
