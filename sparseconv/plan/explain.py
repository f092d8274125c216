"""Why a plan executes as it does, in words and figures."""

from __future__ import annotations

from dataclasses import dataclass

from sparseconv.backends.base import Request
from sparseconv.backends.registry import backend, choose, refusals


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `ConvolutionPlan.explain`; print it to read it.

    >>> import torch
    >>> import sparseconv as sc
    >>> plan = sc.ConvolutionPlan(sc.VoxelGrid(torch.tensor([[0, 0, 0]])), 3)
    >>> plan.explain(torch.ones(1, 4), torch.ones(9, 4, 8)).flops
    64
    """

    plan: str
    request: str
    chosen: str
    said: dict[str, str | None]  # every backend's sentence; None where it could serve
    details: tuple[str, ...]  # what the chosen backend adds
    flops: int  # on real pairs, forward
    fewest_bytes: int  # inputs, weight and outputs once each
    workspace_bytes: int

    def __repr__(self) -> str:
        lines = [self.plan, f"  asked: {self.request}"]
        for name, sentence in self.said.items():
            verdict = "chosen" if name == self.chosen else "could serve" if sentence is None else f"no: {sentence}"
            lines.append(f"  {name}: {verdict}")
        lines += [f"    {detail}" for detail in self.details]
        lines.append(
            f"  forward: {self.flops / 1e9:.3f} GFLOP on real pairs, at least {self.fewest_bytes / 1e6:.1f} MB moved, "
            f"at most {self.workspace_bytes / 1e6:.1f} MB of workspace"
        )
        return "\n".join(lines)


def explain(plan: str, wanted: str, request: Request) -> Explanation:
    """Ask every backend about a request of a plan in words, as `choose` does for the ``wanted`` backend.

    Raises ValueError where none can serve it.
    """
    chosen = choose(request, wanted)
    edges, size = request.kernel_map, request.dtype.itemsize
    weights = edges.num_taps * request.c_in * request.c_out // request.groups
    moved = size * (edges.num_in * request.c_in + edges.num_out * request.c_out + weights)
    grouped = f" in {request.groups} groups" if request.groups > 1 else ""
    return Explanation(
        plan=plan,
        request=f"{request.c_in} -> {request.c_out} channels{grouped}, {request.dtype}, {request.device}",
        chosen=chosen.name,
        said=refusals(request),
        details=tuple(backend(chosen.name).describe(request)),
        flops=request.flops,
        fewest_bytes=moved,
        workspace_bytes=chosen.workspace_bytes(request),
    )
