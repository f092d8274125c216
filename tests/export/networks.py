"""Networks that are exported in tests, each with how its input is made of coordinates and features."""

import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.plan.shared import shared_plan

EXTENT = 12


def spconv_block(c_in, c_out, key, kind=spconv.SubMConv3d, **options):
    conv = kind(c_in, c_out, 3, bias=False, indice_key=key, **options)
    return spconv.SparseSequential(conv, torch.nn.BatchNorm1d(c_out, eps=1e-3), torch.nn.ReLU())


class Residual(spconv.SparseModule):
    """A block that puts its norms and sums in the place of features, as OpenPCDet's does."""

    def __init__(self, channels, key):
        super().__init__()
        self.conv = spconv.SubMConv3d(channels, channels, 3, indice_key=key)
        self.norm, self.act = torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01), torch.nn.ReLU()

    def forward(self, x):
        y = self.conv(x)
        y = y.replace_feature(self.norm(y.features))
        return y.replace_feature(self.act(y.features + x.features))


class Encoder(torch.nn.Module):
    """Layers of spconv's names: levels, the way back, a pool, a dense volume."""

    def __init__(self):
        super().__init__()
        self.stem = spconv_block(4, 8, "subm1")
        self.down = spconv_block(8, 16, "down", spconv.SparseConv3d, stride=2, padding=1)
        self.deep = spconv.SparseSequential(*spconv_block(16, 16, "subm2"), Residual(16, "subm2"))
        self.up = spconv.SparseInverseConv3d(16, 8, 3, indice_key="down")
        self.pool = spconv.SparseMaxPool3d(2, 2)

    def forward(self, x):
        fine = self.stem(x)
        deep = self.deep(self.down(fine))
        back = self.up(deep)
        back = back.replace_feature(back.features + fine.features)
        return {"fine": back, "levels": (deep, self.pool(fine)), "volume": deep.dense()}


class Pools(nn.SparseModule):
    """All that pools, makes voxels or looks at whole items."""

    def __init__(self):
        super().__init__()
        self.conv = nn.SubmanifoldConv(4, 8, 3, groups=2)
        self.max, self.avg, self.sum = nn.MaxPool(2), nn.AvgPool(3, stride=2, count_absent=True), nn.SumPool(2)
        self.with_winners, self.unpool, self.max_unpool = (
            nn.MaxPool(2, return_winners=True),
            nn.Unpool(2),
            nn.MaxUnpool(2),
        )
        self.make = nn.ConvTranspose(8, 4, 2, stride=2)
        self.norms = torch.nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm(8, affine=True), nn.LayerNorm(8)])
        self.items = torch.nn.ModuleList([nn.GlobalSumPool(), nn.GlobalAvgPool(), nn.GlobalMaxPool()])

    def forward(self, x):
        y = self.conv(x)
        high, winners = self.with_winners(y)
        back = self.max_unpool(high, winners, onto=x)
        near = y.grid.lookup(y.grid.coords + torch.tensor([0, 0, 0, 1], dtype=torch.int32))
        kept = y.subset(y.features[:, 0] > 0)
        return {
            "pooled": [self.max(y), self.avg(y), self.sum(y)],
            "back": (back, self.unpool(high, onto=x), self.make(high)),
            "norms": [norm(y) for norm in self.norms],
            "items": [pool(y) for pool in self.items],
            "volume": y.to_dense((EXTENT, EXTENT, EXTENT)),
            "near": near,
            "kept": (kept, self.norms[0](kept), self.conv(kept.with_features(kept.features[:, :4]))),
            "winners": winners,
        }


class Written(torch.nn.Module):
    """Plans that a module writes out itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 4, 6))
        self.other = torch.nn.Parameter(torch.randn(8, 6, 5))

    def forward(self, x):
        cross = [[0, 0, 0]] + [[s * (a == i) for a in range(3)] for i in range(3) for s in (-1, 1)]
        torus = sc.Boundary.periodic((EXTENT, EXTENT, EXTENT))
        plan = shared_plan(x.grid, taps=cross, boundary=torus)
        y = plan.execute(x.features, self.weight, epilogue=sc.pointwise.silu)
        made = sc.ConvolutionPlan.transposed(x.grid, 2, stride=2)
        inside = shared_plan(x.grid, 3, target="full", boundary=sc.Boundary.forbid((EXTENT,) * 3))
        z = inside.execute(x.features, self.weight[:1].expand(27, 4, 6))
        return y, sc.SparseTensor(made.target, made.execute(y, self.other)), sc.SparseTensor(inside.target, z)


def sparse(coords, features):
    return sc.SparseTensor(sc.VoxelGrid(coords, 2), features)


def spconv_input(coords, features):
    return spconv.SparseConvTensor(features, coords, [EXTENT] * 3, 2)


MADE = {
    "unet": (lambda: nn.UNet(4, 5, channels=(8, 16, 24)), sparse),
    "spconv": (Encoder, spconv_input),
    "pools": (Pools, sparse),
    "written": (Written, sparse),
}
LARGE = {
    "second": (lambda: nn.SecondEncoder(4, (41, 32, 32)), sparse),
    "residual": (lambda: nn.VoxelResBackBone8x(4, (41, 32, 32)), sparse),
    "spunet": (lambda: nn.SpUNet(4, 5), sparse),
    "minkunet": (lambda: nn.MinkUNet(4, 5), sparse),
}


def network(name):
    make, wrap = (MADE | LARGE)[name]
    torch.manual_seed(0)
    net = make()
    for module in net.modules():
        if getattr(module, "running_var", None) is not None:
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 2)
    return net.eval(), wrap


def scene(seed, rows=150):
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(2 * EXTENT**3, generator=generator)[:rows]
    sides = (EXTENT**3, EXTENT**2, EXTENT, 1)
    columns = [cells // side % (EXTENT if at else 2) for at, side in enumerate(sides)]
    return torch.stack(columns, 1).int(), torch.randn(rows, 4, generator=generator)
