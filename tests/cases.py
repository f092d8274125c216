"""The cases that every backend runs over, in one place: geometries as data, and the one tolerance table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import sparseconv as sc

#: error of the result over its rms, for operands rounded to the dtype and a reference in fp64 from the rounded
#: operands; halves are dominated by the one rounding of the result (2^-11, 2^-8 of its largest values), tf32 by its
#: 10-bit operands
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    "tf32": 3e-2,
    torch.float16: 1e-2,
    torch.bfloat16: 8e-2,
}


@dataclass(frozen=True, repr=False)
class Case:
    """A geometry, its channels, and how the plan is made."""

    name: str
    rank: int = 3
    voxels: int = 60
    extent: int = 5
    batch: int = 2
    kernel: int | tuple[int, ...] | None = 3
    c_in: int = 5
    c_out: int = 7
    groups: int = 1
    kind: str = "forward"  # forward | transposed | transpose (of a forward plan)
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("no_voxels", voxels=0),
    Case("one_voxel", voxels=1),
    Case("no_pairs", kernel=2, options={"padding": 40}),
    Case("submanifold"),
    Case("odd_channels", c_in=1, c_out=3),
    Case("wide", c_in=33, c_out=65),
    Case("line", rank=1, voxels=9, extent=9, kernel=5),
    Case("plane", rank=2, voxels=30, extent=8),
    Case("four_axes", rank=4, voxels=60, extent=3),
    Case("even_kernel", kernel=2),
    Case("asymmetric", kernel=(1, 2, 3)),
    Case("dilated", options={"dilation": 2}),
    Case("full", options={"target": "full"}),
    Case("padded", kernel=(3, 2, 1), options={"padding": (2, 0, 1)}),
    Case("strided", kernel=2, options={"stride": 2}),
    Case("strided_overlap", kernel=3, options={"stride": 2}),
    Case("strided_gaps", kernel=2, options={"stride": 3}),
    Case("mixed_strides", kernel=(3, 2, 1), options={"stride": (2, 1, 3), "dilation": (1, 2, 1)}),
    Case("forbid", options={"boundary": "forbid"}),
    Case("periodic", options={"boundary": sc.Boundary.periodic((5, 5, 5))}),
    Case("periodic_strided", kernel=3, extent=6, options={"boundary": sc.Boundary.periodic((6, 6, 6)), "stride": 2}),
    Case("cross", kernel=None, options={"taps": [(0, 0, 0), (0, 0, 1), (0, 0, -1), (0, 1, 0), (-2, 0, 0)]}),
    Case("taps_125", kernel=5, voxels=40),
    Case("grouped", c_in=6, c_out=4, groups=2),
    Case("depthwise", c_in=6, c_out=6, groups=6),
    Case("depthwise_multiplier", c_in=3, c_out=6, groups=3),
    Case("inverse", kernel=2, kind="transpose", options={"stride": 2}),
    Case("transposed_submanifold", kind="transpose"),
    Case("generative", kernel=2, kind="transposed", options={"stride": 2}),
    Case("generative_overlap", kernel=3, kind="transposed", options={"stride": 2}),
]


def named(*names: str) -> list[Case]:
    """Those cases, in the order of `CASES`."""
    return [case for case in CASES if case.name in names]


def random_grid(case: Case, seed: int = 0, shuffle: bool = True) -> sc.VoxelGrid:
    """Voxels of a case: in the cube [0, extent)^D for periodic ones, around the origin (negatives too) for others."""
    gen = torch.Generator().manual_seed(seed)
    low = 0 if "boundary" in case.options else -(case.extent // 2)
    cells = case.batch * case.extent**case.rank
    picked = torch.randperm(cells, generator=gen)[: case.voxels]
    coords = []
    for size in [case.extent] * case.rank:
        coords.append(picked % size + low)
        picked = picked // size
    coords = torch.stack([picked, *coords], 1)
    if not shuffle:
        coords = torch.unique(coords, dim=0)
    return sc.VoxelGrid(coords, case.batch + 1)  # the last batch item is empty


def build(case: Case, device: str = "cpu", seed: int = 0, **options) -> sc.ConvolutionPlan:
    """The plan of a case."""
    grid = random_grid(case, seed).to(device)
    options = {**case.options, "groups": case.groups, **options}
    if case.kind == "transposed":
        return sc.ConvolutionPlan.transposed(grid, case.kernel, **options)
    plan = sc.ConvolutionPlan(grid, case.kernel, **options)
    return plan.transpose() if case.kind == "transpose" else plan


def operands(plan: sc.ConvolutionPlan, case: Case, dtype=torch.float64, integers: bool = False, seed: int = 0):
    """x (N_in, C_in), weight (K, C_in/G, C_out), grad (N_out, C_out): random, or integers in -2..2."""
    gen = torch.Generator().manual_seed(seed + 1)
    shapes = [
        (plan.kernel_map.num_in, case.c_in),
        (plan.num_taps, case.c_in // case.groups, case.c_out),
        (plan.kernel_map.num_out, case.c_out),
    ]
    make = (lambda s: torch.randint(-2, 3, s, generator=gen)) if integers else (lambda s: torch.randn(s, generator=gen))
    return [make(shape).to(dtype).to(plan.device) for shape in shapes]


def error(got: torch.Tensor, want) -> float:
    """Largest deviation over max(rms, 1e-3) of the reference; infinite for NaN or another shape."""
    want = torch.as_tensor(want, dtype=torch.float64)
    got, want = got.detach().double().cpu(), want.detach().cpu()
    if got.shape != want.shape or bool(got.isnan().any()):
        return float("inf")
    if want.numel() == 0:
        return 0.0
    return float((got - want).abs().max() / max(float(want.square().mean().sqrt()), 1e-3))
