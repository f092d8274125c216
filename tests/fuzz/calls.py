"""Bad calls of the library's own public functions, each of which must be refused in words."""

from __future__ import annotations

import tempfile

import torch

import sparseconv as sc
import sparseconv.products as products
from sparseconv import distributed, nn, ops, pointwise, viz
from sparseconv.interop import checkpoints
from tests.fuzz._bad_calls import COORDS, GRID, PLAN, Call, by_place, call, wrong_answers

#: kinds that an operand of a pointwise function takes beside tensors of the other's shape
NUMBERS = "float,nan,negative,complex,scalar tensor"
#: what may be added to a sparse tensor
SUMMANDS = "float,nan,negative,complex,scalar tensor,complex tensor,bool tensor"
#: tensors that a pointwise function of one operand takes
ANY_TENSOR = f"{NUMBERS},meta tensor,other shape,complex tensor,bool tensor"
TENSORS = "sparse,csr,quantised,nested,strided nested,complex tensor,bool tensor,meta tensor,other shape,scalar tensor"
#: kinds that torch's own modules are given as they are, and answer as torch does
OF_TORCH = "meta tensor"
#: kinds of which only the dtype is read
OF_ITS_DTYPE = "meta tensor,other shape,scalar tensor"
COARSE = sc.ConvolutionPlan(GRID, 2, stride=2)
TAPS = torch.randn(27, 4, 6)
ROWS = torch.tensor([0, 1, 1, 2])


def features() -> torch.Tensor:
    return torch.randn(len(GRID), 4)


def tensor() -> sc.SparseTensor:
    return sc.SparseTensor(GRID, features())


def _products() -> list[Call]:
    scale = products.sparse_scale_infos([0, 1], [1, 0], None, 2, 2)
    infos = products.sparse_product_infos([0, 1], [1, 0], [0, 1], None, 2, 2, 2)
    x, shapes = torch.ones(2, 4), {"outer": (4, 3), "vecmat": (4, 4), "mat_t_vec": (4, 4)}
    found = [
        call(
            "sparse_scale",
            products.sparse_scale,
            lambda: {"x": x, "info": scale[0], "info_backward": scale[1], "out": None},
            info_backward="none",
            out="none",
        ),
        call(
            "sparse_scale_infos",
            products.sparse_scale_infos,
            lambda: {"index": [0, 1], "index_out": [1, 0], "scale": None, "out_size": 2, "in_size": 2},
            scale="none",
            out_size="",
            in_size="",
        ),
        call(
            "sparse_product_infos",
            products.sparse_product_infos,
            lambda: {
                "index1": [0],
                "index2": [0],
                "index_out": [0],
                "scale": None,
                "out_size": 1,
                "in1_size": 1,
                "in2_size": 1,
            },
            scale="none",
            out_size="huge",
            in1_size="huge",
            in2_size="huge",
        ),
        call(
            "SparseScaleInfo",
            products.SparseScaleInfo,
            lambda: {
                "scale": None,
                "index": torch.tensor([0]),
                "seg_out": torch.tensor([0, 1]),
                "index_out": None,
                "out_size": 1,
                "in_size": 2,
            },
            scale="none",
            index="none",
            seg_out="none",
            index_out="none",
            out_size="none",
            in_size="none,huge",
        ),
        call(
            "SparseProductInfo",
            products.SparseProductInfo,
            lambda: {
                "scale": None,
                "index1": torch.tensor([0]),
                "index2": torch.tensor([0]),
                "seg_out": torch.tensor([0, 1]),
                "gather_index": None,
                "index_out": None,
                "out_size": 1,
            },
            scale="none",
            index1="none",
            index2="none",
            seg_out="none",
            gather_index="none",
            index_out="none",
            out_size="none",
        ),
        call("SparseProductInfo.to", infos[0].to, lambda: {"device": "cpu"}),
        call("SparseScaleInfo.to", scale[0].to, lambda: {"device": "cpu"}),
    ]
    for name in ("mul", "outer", "inner", "vecmat", "vecsca", "scavec", "mat_t_vec"):
        first = torch.ones(2, *shapes[name]) if name == "mat_t_vec" else torch.ones(2) if name == "scavec" else x
        second = torch.ones(2, *shapes[name]) if name == "vecmat" else torch.ones(2) if name == "vecsca" else x
        found.append(
            call(
                f"sparse_{name}",
                getattr(products, f"sparse_{name}"),
                lambda first=first, second=second: {
                    "x": first,
                    "y": second,
                    "info": infos[0],
                    "info_backward1": infos[1],
                    "info_backward2": infos[2],
                    "out": None,
                },
                info_backward1="none",
                info_backward2="none",
                out="none",
            )
        )
    return found


def _plans() -> list[Call]:
    bias, residual = torch.ones(6), torch.ones(len(GRID), 6)
    return [
        call(
            "plan.execute",
            PLAN.execute,
            lambda: {"x": features(), "weight": TAPS, "bias": bias, "residual": residual, "epilogue": pointwise.relu},
            bias="none",
            residual="none",
            epilogue="none",
        ),
        call(
            "plan.explain",
            PLAN.explain,
            lambda: {"x": features(), "weight": TAPS},
            x=OF_ITS_DTYPE,
        ),
        call("plan.to", PLAN.to, lambda: {"device": "cpu"}),
        call("plan.with_groups", PLAN.with_groups, lambda: {"groups": 2}, groups="huge"),
        call("SparseTensor", sc.SparseTensor, lambda: {"grid": GRID, "features": features()}, grid="grid"),
        call(
            "SparseTensor.to",
            tensor().to,
            lambda: {"device": "cpu", "dtype": torch.float64},
            device="none,dtype",
            dtype="none,dtype",
        ),
        call("SparseTensor.with_features", tensor().with_features, lambda: {"features": features()}),
        call("SparseTensor.cat", lambda other: tensor().cat(other), lambda: {"other": tensor()}, other="sparse tensor"),
        call(
            "SparseTensor.__add__",
            lambda other: tensor() + other,
            lambda: {"other": tensor()},
            other=f"sparse tensor,{SUMMANDS}",
        ),
        call(
            "SparseTensor.from_dense",
            sc.SparseTensor.from_dense,
            lambda: {"dense": torch.ones(1, 2, 3, 3)},
            dense="other shape",
        ),
        call(
            "SparseTensor.from_list",
            sc.SparseTensor.from_list,
            lambda: {"coords": [COORDS[:, 1:]], "features": [features()]},
        ),
        call(
            "SparseTensor.from_nested",
            sc.SparseTensor.from_nested,
            lambda: {"grid": GRID, "nested": tensor().to_nested()},
            grid="grid",
        ),
        call("SparseTensor.to_dense", tensor().to_dense, lambda: {"extent": (5, 5, 5)}, extent="none"),
    ]


def _ops() -> list[Call]:
    y, winners = ops.max_pool(features(), COARSE)
    logits = ops.neighborhood_logits(features(), features(), PLAN)
    points, batch = torch.rand(4, 3), torch.zeros(4, dtype=torch.int32)
    groups = ops.PointGroups(ROWS, 3)
    place = ops.Interpolation(GRID, points)
    found = [
        call(name, getattr(ops, name), lambda: {"x": features(), "plan": COARSE}, plan="plan")
        for name in ("sum_pool", "avg_pool", "max_pool")
    ]
    found += [
        call(name, getattr(ops, name), lambda: {"x": features(), "grid": GRID}, grid="grid")
        for name in ("global_sum_pool", "global_avg_pool", "global_max_pool")
    ]
    for name in ("interpolate", "splat"):
        rows = {"interpolate": features, "splat": lambda: torch.ones(4, 4)}[name]
        first = {"interpolate": "x", "splat": "values"}[name]
        found.append(
            call(
                name,
                getattr(ops, name),
                lambda rows=rows, first=first: {
                    first: rows(),
                    "grid": GRID,
                    "points": points,
                    "mode": "linear",
                    "batch": batch,
                },
                batch="none",
                grid="grid",
            )
        )
    return [
        *found,
        call("unpool", ops.unpool, lambda: {"x": y, "plan": COARSE.transpose()}),
        call("max_unpool", ops.max_unpool, lambda: {"x": y, "winners": winners, "plan": COARSE.transpose()}),
        call(
            "Interpolation",
            ops.Interpolation,
            lambda: {"grid": GRID, "points": points, "batch": batch, "mode": "linear"},
            batch="none",
            grid="grid",
        ),
        call(
            "Interpolation.interpolate", place.interpolate, lambda: {"x": features(), "points": points}, points="none"
        ),
        call(
            "Interpolation.splat",
            place.splat,
            lambda: {"values": torch.ones(4, 2), "points": points},
            points="none",
            values="",
        ),
        call("PointGroups", ops.PointGroups, lambda: {"point_rows": ROWS, "num_voxels": 3}),
        call("PointGroups.reduce", groups.reduce, lambda: {"features": torch.ones(4, 2), "how": "mean"}),
        call("PointGroups.spread", groups.spread, lambda: {"x": torch.ones(3, 2)}),
        call(
            "voxelize_features",
            ops.voxelize_features,
            lambda: {"point_features": torch.ones(4, 2), "point_rows": ROWS, "num_voxels": 3, "reduce": "mean"},
        ),
        call(
            "neighborhood_logits",
            ops.neighborhood_logits,
            lambda: {"q": features(), "k": features(), "plan": PLAN},
            plan="plan",
        ),
        call("neighborhood_softmax", ops.neighborhood_softmax, lambda: {"logits": logits, "plan": PLAN}, plan="plan"),
        call(
            "neighborhood_attention",
            ops.neighborhood_attention,
            lambda: {"q": features(), "k": features(), "v": features(), "plan": PLAN, "bias": torch.ones(27)},
            plan="plan",
            bias="none",
        ),
        call(
            "depthwise_convolution",
            ops.depthwise_convolution,
            lambda: {"x": features(), "weight": torch.ones(27, 4), "plan": PLAN},
            plan="plan",
        ),
    ]


def _modules() -> list[Call]:
    layers: dict[str, torch.nn.Module] = {
        "SubmanifoldConv": nn.SubmanifoldConv(4, 6, 3),
        "Conv": nn.Conv(4, 6, 2, stride=2),
        "ConvTranspose": nn.ConvTranspose(4, 6, 2, stride=2),
        "BatchNorm": nn.BatchNorm(4),
        "LayerNorm": nn.LayerNorm(4),
        "GroupNorm": nn.GroupNorm(2, 4),
        "InstanceNorm": nn.InstanceNorm(4),
        "ReLU": nn.ReLU(),
        "Linear": nn.Linear(4, 6),
        "SumPool": nn.SumPool(2),
        "AvgPool": nn.AvgPool(2),
        "MaxPool": nn.MaxPool(2),
        "GlobalAvgPool": nn.GlobalAvgPool(),
        "UNet": nn.UNet(4, 3, channels=(4, 8)),
        "ToDense": nn.ToDense(),
        "ResidualBlock": nn.ResidualBlock(4, 4),
    }
    found = []
    for name, layer in layers.items():
        found.append(call(f"nn.{name}.forward", layer, lambda: {"x": tensor()}, x=f"sparse tensor,{OF_TORCH}"))
    found += [
        call(
            f"nn.{kind.__name__}",
            kind,
            lambda: {
                "in_channels": 4,
                "out_channels": 6,
                "kernel_size": 3,
                "groups": 2,
                "dilation": 1,
                "padding": None,
                "boundary": "absent",
                "rank": 3,
            },
            padding="none,negative,huge",
            dilation="huge",
            in_channels="huge",
            out_channels="huge",
        )
        for kind in (nn.SubmanifoldConv, nn.Conv, nn.ConvTranspose, nn.InverseConv)
    ]
    down = nn.InverseConv(6, 4, 2, stride=2)
    return [
        *found,
        call(
            "nn.InverseConv.forward",
            down,
            lambda: {"x": layers["Conv"](TENSOR), "onto": TENSOR},
            onto="grid,sparse tensor",
        ),
        call(
            "nn.SumPool",
            nn.SumPool,
            lambda: {"kernel_size": 2, "stride": 2, "rank": 3},
            stride="none,huge",
            kernel_size="huge",
        ),
        call(
            "nn.SubmanifoldConv.forward(plan)",
            layers["SubmanifoldConv"],
            lambda: {"x": features(), "plan": PLAN},
            plan="plan",
            x="sparse tensor",
        ),
        call("nn.Sequential", by_place(nn.Sequential), lambda: {"layer": nn.ReLU()}, layer="none,module,csr"),
        call("nn.BatchNorm", nn.BatchNorm, lambda: {"num_features": 4}),
        call("nn.UNet", nn.UNet, lambda: {"in_channels": 4, "out_channels": 3, "channels": (4, 8)}),
    ]


def _others() -> list[Call]:
    f = torch.ones(3, 4)
    folder = tempfile.mkdtemp()
    state = {"a.weight": torch.ones(4, 3, 3, 3, 2)}
    torch.save(state, f"{folder}/a.pth")
    found = []
    for name in ("relu", "silu", "gelu", "sigmoid", "tanh"):
        found.append(call(f"pointwise.{name}", by_place(getattr(pointwise, name)), lambda: {"x": f}, x=ANY_TENSOR))
    for name in ("add", "mul", "sub", "div"):
        found.append(
            call(
                f"pointwise.{name}",
                by_place(getattr(pointwise, name)),
                lambda: {"x": f, "y": f},
                x="scalar tensor",
                y=NUMBERS,
            )
        )
    return [
        *found,
        call("checkpoints.read", checkpoints.read, lambda: {"path": f"{folder}/a.pth"}),
        call(
            "checkpoints.write",
            checkpoints.write,
            lambda: {"state": state, "path": f"{folder}/b.pth"},
            path="string",
            state="dict,list",
        ),
        call(
            "checkpoints.convert",
            checkpoints.convert,
            lambda: {
                "path_in": f"{folder}/a.pth",
                "path_out": f"{folder}/c.pth",
                "from_": "spconv",
                "to": "sparseconv",
            },
            path_out="string",
        ),
        call(
            "viz.show",
            viz.show,
            lambda: {"what": GRID, "values": torch.ones(len(GRID)), "batch": 0},
            what="grid,plan,sparse tensor",
            values="none",
            batch="",
        ),
        call(
            "distributed.shard",
            distributed.shard,
            lambda: {"grid": GRID, "by": "morton", "batch_size": None},
            grid=f"{TENSORS},grid",
            batch_size="none",
        ),
        call("distributed.load", distributed.load, lambda: {"path": f"{folder}/none"}, path="string"),
        call(
            "distributed.save",
            distributed.save,
            lambda: {"path": f"{folder}/none", "grid": GRID, "features": features()},
        ),
    ]


TENSOR = tensor()
TABLE: list[Call] = [*_products(), *_plans(), *_ops(), *_modules(), *_others()]


def main(count: int, seed: int) -> list[str]:
    """Draw ``count`` bad calls, each once at most; return what is wrong with their answers."""
    return wrong_answers(TABLE, count, seed)
