"""Bad calls by the names of other libraries, each of which must be refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import sparseconv.interop.minkowski as ME
import sparseconv.interop.spconv.pytorch as spconv
import sparseconv.interop.torchsparse as torchsparse
import sparseconv.interop.torchsparse.nn as spnn
import sparseconv.interop.torchsparse.nn.functional as spf
from sparseconv.interop import flex_gemm, fvdb
from sparseconv.interop.minkowski.utils import batched_coordinates, quantization, sparse_collate
from sparseconv.interop.spconv import utils as spconv_utils
from sparseconv.interop.spconv.hash import HashTable
from sparseconv.interop.spconv.pytorch import functional, ops
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel, gather_features_by_pc_voxel_id
from sparseconv.interop.torchsparse.utils import collate, quantize
from tests.fuzz._bad_calls import COORDS, GRID, WRONG, Call, Kinds, by_place, call, wrong_answers

#: and a tensor of each library, given to the others
KINDS: Kinds = WRONG | {
    "spconv tensor": lambda: scene(),
    "minkowski tensor": lambda: voxels(),
    "torchsparse tensor": lambda: sparse(),
}
#: numbers that torch adds to features, or multiplies them by
SUMMANDS = "float,nan,negative,huge,complex,scalar tensor"
#: what torch's own activation takes, as it does
ANY = "complex tensor,bool tensor,meta tensor,sparse,csr,quantised,nested,strided nested"
SHAPE = [5, 5, 5]


# ---- spconv


def rows() -> torch.Tensor:
    return torch.randn(len(COORDS), 4)


def scene(**options: Any) -> spconv.SparseConvTensor:
    return spconv.SparseConvTensor(rows(), COORDS.clone(), SHAPE, 1, **options)


def _spconv() -> list[Call]:
    own = "spconv tensor"
    down = spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="down")
    layers: dict[str, torch.nn.Module] = {
        "SubMConv3d": spconv.SubMConv3d(4, 6, 3),
        "SubMConv3d(1)": spconv.SubMConv3d(4, 6, 1),
        "SparseConv3d": spconv.SparseConv3d(4, 6, 3, 2, 1),
        "SparseConvTranspose3d": spconv.SparseConvTranspose3d(4, 6, 3, 2, 1),
        "SparseInverseConv3d": spconv.SparseInverseConv3d(4, 6, 3, indice_key="down"),
        "SparseMaxPool3d": spconv.SparseMaxPool3d(2),
        "SparseAvgPool3d": spconv.SparseAvgPool3d(2),
        "SparseGlobalMaxPool": spconv.SparseGlobalMaxPool(),
        "SparseGlobalAvgPool": spconv.SparseGlobalAvgPool(),
        "SparseBatchNorm": spconv.SparseBatchNorm(4),
        "SparseReLU": spconv.SparseReLU(),
    }
    found = []
    for name, layer in layers.items():
        given = (lambda: down(scene())) if name == "SparseInverseConv3d" else scene
        features = {"SparseReLU": f"{ANY},other shape,scalar tensor", "SparseBatchNorm": "meta tensor"}.get(name, "")
        found.append(
            call(f"spconv.{name}.forward", layer, lambda given=given: {"input": given()}, input=f"{own},{features}")
        )
    for kind in (spconv.SubMConv3d, spconv.SparseConv3d, spconv.SparseConvTranspose3d):
        found.append(
            call(
                f"spconv.{kind.__name__}",
                kind,
                lambda: {
                    "in_channels": 4,
                    "out_channels": 6,
                    "kernel_size": 3,
                    "stride": 1,
                    "padding": 0,
                    "dilation": 1,
                    "groups": 2,
                    "algo": None,
                },
                padding="negative",
                algo="none",
            )
        )
    for kind in (spconv.SparseMaxPool3d, spconv.SparseAvgPool3d):
        found.append(
            call(
                f"spconv.{kind.__name__}",
                kind,
                lambda: {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "algo": None},
                stride="none",
                padding="negative",
                algo="none",
            )
        )
    sizes = {"kernel_size": [3] * 3, "stride": [2] * 3, "padding": [1] * 3, "dilation": [1] * 3}
    return [
        *found,
        call("spconv.ToDense", spconv.ToDense(), lambda: {"x": scene()}, x=own),
        call("spconv.RemoveGrid", spconv.RemoveGrid(), lambda: {"x": scene()}, x=own),
        call(
            "spconv.SparseConvTensor",
            spconv.SparseConvTensor,
            lambda: {"features": rows(), "indices": COORDS, "spatial_shape": SHAPE, "batch_size": 1},
            features="quantised,complex tensor,bool tensor,meta tensor",
            indices="meta tensor",
        ),
        call(
            "spconv.SparseConvTensor.indices",
            lambda value: setattr(scene(), "indices", value),
            lambda: {"value": COORDS},
            value="meta tensor",
        ),
        call(
            "spconv.SparseConvTensor.replace_feature",
            lambda feature: scene().replace_feature(feature),
            lambda: {"feature": rows()},
            feature="quantised,complex tensor,bool tensor,meta tensor,other shape",
        ),
        call(
            "spconv.SparseConvTensor.select_by_index",
            lambda rows: scene().select_by_index(rows),
            lambda: {"rows": torch.tensor([0, 2])},
        ),
        call(
            "spconv.SparseConvTensor.__add__",
            lambda other: scene() + other,
            lambda: {"other": scene()},
            other=f"{own},{SUMMANDS}",
        ),
        call(
            "spconv.SparseConvTensor.from_dense",
            spconv.SparseConvTensor.from_dense,
            lambda: {"x": torch.ones(1, 2, 2, 3)},
            x="other shape",
        ),
        call(
            "spconv.SparseConvTensor.from_sparse_tensor",
            spconv.SparseConvTensor.from_sparse_tensor,
            lambda: {"x": scene().to_sparse_tensor(), "spatial_shape": SHAPE},
            x="sparse tensor",
        ),
        call("spconv.sparse_add", by_place(functional.sparse_add), lambda: {"a": scene(), "b": scene()}, a=own, b=own),
        call(
            "spconv.AddTable",
            lambda a, b: spconv.AddTable()([a, b]),
            lambda: {"a": scene(), "b": scene()},
            a=own,
            b=own,
        ),
        call(
            "spconv.JoinTable",
            lambda a, b: spconv.JoinTable()([a, b]),
            lambda: {"a": scene(), "b": scene()},
            a=own,
            b=own,
        ),
        call("spconv.AddTable.forward", spconv.AddTable(), lambda: {"input": [scene()]}),
        call(
            "spconv.SparseSequential",
            by_place(spconv.SparseSequential),
            lambda: {"module": spconv.SparseReLU()},
            module="none,module,csr",
        ),
        call("spconv.SparseBatchNorm", spconv.SparseBatchNorm, lambda: {"num_features": 4}),
        call(
            "spconv.get_indice_pairs",
            ops.get_indice_pairs,
            lambda: {
                "indices": COORDS,
                "batch_size": 1,
                "spatial_shape": SHAPE,
                "algo": None,
                "ksize": [3] * 3,
                "stride": [1] * 3,
                "padding": [1] * 3,
                "dilation": [1] * 3,
                "out_padding": [0] * 3,
            },
            algo=",".join(KINDS),
            out_padding=",".join(KINDS),
        ),
        call(
            "spconv.get_conv_output_size",
            ops.get_conv_output_size,
            lambda: {"input_size": [9] * 3, **sizes},
            padding="negative",
            kernel_size="negative",
        ),
        call(
            "spconv.get_deconv_output_size",
            ops.get_deconv_output_size,
            lambda: {"input_size": [9] * 3, **sizes, "output_padding": [0] * 3},
            padding="negative",
            output_padding="negative",
        ),
        call(
            "spconv.PointToVoxel",
            PointToVoxel,
            lambda: {
                "vsize_xyz": [1.0] * 3,
                "coors_range_xyz": [0.0] * 3 + [4.0] * 3,
                "num_point_features": 3,
                "max_num_voxels": 10,
                "max_num_points_per_voxel": 3,
                "device": "cpu",
            },
        ),
        call(
            "spconv.PointToVoxel.__call__",
            PointToVoxel([1.0] * 3, [0.0] * 3 + [4.0] * 3, 3, 10, 3),
            lambda: {"pc": torch.rand(5, 3)},
        ),
        call(
            "spconv.gather_features_by_pc_voxel_id",
            gather_features_by_pc_voxel_id,
            lambda: {"seg_res_features": torch.ones(3, 2), "pc_voxel_id": torch.tensor([0, 2, -1])},
            seg_res_features="other shape,complex tensor,bool tensor",
        ),
        call(
            "spconv.VoxelGeneratorV2",
            spconv_utils.VoxelGeneratorV2,
            lambda: {"voxel_size": [1.0] * 3, "point_cloud_range": [0.0] * 3 + [4.0] * 3, "max_num_points": 3},
        ),
        call(
            "spconv.VoxelGenerator.generate",
            spconv_utils.VoxelGenerator([1.0] * 3, [0.0] * 3 + [4.0] * 3, 3).generate,
            lambda: {"points": np.ones((5, 3), np.float32), "max_voxels": 9},
            points="ndarray",
            max_voxels="none",
        ),
        call("spconv.indice_conv", functional.indice_conv, _table, bias="none", act_type="none", **_ignored),
        call(
            "spconv.indice_inverse_conv",
            functional.indice_inverse_conv,
            _table,
            bias="none",
            act_type="none",
            **_ignored,
        ),
        call(
            "spconv.HashTable.query",
            HashTable(torch.device("cpu"), torch.int64, torch.int64).query,
            lambda: {"keys": torch.tensor([5, 9])},
        ),
    ]


#: arguments that choose kernels or time them, and may be anything
_ignored = {"algo": ",".join(KINDS), "timer": ",".join(KINDS)}


def _table() -> dict[str, Any]:
    rows = torch.arange(3).expand(2, 27, 3).int()
    given = {"features": torch.ones(3, 4), "filters": torch.ones(6, 3, 3, 3, 4), "indice_pairs": rows}
    counts = {"indice_pair_num": torch.full((27,), 3), "num_activate_out": 3, "algo": None, "timer": None}
    return given | counts | {"bias": torch.ones(6), "act_type": None}


# ---- MinkowskiEngine


def voxels() -> ME.SparseTensor:
    return ME.SparseTensor(rows(), COORDS)


def field() -> ME.TensorField:
    return ME.TensorField(rows(), COORDS + 0.25)


FIELD = field()


def _minkowski() -> list[Call]:
    own = "minkowski tensor"
    layers: dict[str, torch.nn.Module] = {
        "MinkowskiConvolution": ME.MinkowskiConvolution(4, 6, kernel_size=3, dimension=3),
        "MinkowskiConvolution(1)": ME.MinkowskiConvolution(4, 6, kernel_size=1, dimension=3),
        "MinkowskiConvolutionTranspose": ME.MinkowskiConvolutionTranspose(4, 6, kernel_size=3, dimension=3),
        "MinkowskiGenerativeConvolutionTranspose": ME.MinkowskiGenerativeConvolutionTranspose(
            4, 6, kernel_size=3, dimension=3
        ),
        "MinkowskiChannelwiseConvolution": ME.MinkowskiChannelwiseConvolution(4, kernel_size=3, dimension=3),
        "MinkowskiMaxPooling": ME.MinkowskiMaxPooling(2, 2, dimension=3),
        "MinkowskiAvgPooling": ME.MinkowskiAvgPooling(3, 1, dimension=3),
        "MinkowskiGlobalPooling": ME.MinkowskiGlobalPooling(),
        "MinkowskiBatchNorm": ME.MinkowskiBatchNorm(4),
        "MinkowskiInstanceNorm": ME.MinkowskiInstanceNorm(4),
        "MinkowskiReLU": ME.MinkowskiReLU(),
        "MinkowskiLinear": ME.MinkowskiLinear(4, 6),
        "MinkowskiToFeature": ME.MinkowskiToFeature(),
        "MinkowskiToDenseTensor": ME.MinkowskiToDenseTensor(),
    }
    found = [
        call(f"ME.{name}.forward", by_place(layer), lambda: {"input": voxels()}, input=own)
        for name, layer in layers.items()
    ]
    pruned, union = ME.MinkowskiPruning(), ME.MinkowskiUnion()
    mask = torch.ones(len(COORDS), dtype=torch.bool)
    window = {"kernel_size": 3, "stride": 1, "dilation": 1, "dimension": 3}
    for kind in (ME.MinkowskiConvolution, ME.MinkowskiConvolutionTranspose, ME.MinkowskiChannelwiseConvolution):
        channels = {"in_channels": 4} | ({} if kind is ME.MinkowskiChannelwiseConvolution else {"out_channels": 6})
        found.append(
            call(
                f"ME.{kind.__name__}",
                kind,
                lambda channels=channels: {**channels, **window, "kernel_generator": None},
                kernel_generator="none",
            )
        )
    for kind in (ME.MinkowskiMaxPooling, ME.MinkowskiSumPooling):
        found.append(call(f"ME.{kind.__name__}", kind, lambda: dict(window)))
    manager = voxels().coordinate_manager
    return [
        *found,
        call(
            "ME.SparseTensor",
            ME.SparseTensor,
            lambda: {
                "features": rows(),
                "coordinates": COORDS,
                "tensor_stride": 1,
                "coordinate_manager": None,
                "quantization_mode": ME.SparseTensorQuantizationMode.RANDOM_SUBSAMPLE,
                "device": None,
            },
            coordinate_manager="none",
            device="none",
            features="complex tensor,bool tensor,quantised",
        ),
        call(
            "ME.TensorField",
            ME.TensorField,
            lambda: {
                "features": rows(),
                "coordinates": COORDS + 0.25,
                "tensor_stride": 1,
                "coordinate_manager": None,
                "quantization_mode": ME.SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE,
                "device": None,
            },
            coordinate_manager="none",
            device="none",
            features="complex tensor,bool tensor,quantised",
        ),
        call("ME.SparseTensor.__add__", lambda other: voxels() + other, lambda: {"other": 1.0}, other=SUMMANDS),
        call(
            "ME.SparseTensor.dense",
            lambda **given: voxels().dense(**given),
            lambda: {"shape": (1, 4, 5, 5, 5), "min_coordinate": None},
            shape="none",
            min_coordinate="none",
        ),
        call(
            "ME.SparseTensor.features_at_coordinates",
            lambda query: voxels().features_at_coordinates(query),
            lambda: {"query": COORDS + 0.5},
        ),
        call("ME.SparseTensor.slice", lambda X: FIELD.sparse().slice(X), lambda: {"X": FIELD}),
        call("ME.TensorField.sparse", lambda stride: field().sparse(stride), lambda: {"stride": 1}),
        call("ME.MinkowskiPruning.forward", pruned, lambda: {"input": voxels(), "mask": mask}, input=own),
        call("ME.MinkowskiUnion.forward", by_place(union), lambda: {"a": (x := voxels()), "b": x}),
        call("ME.cat", by_place(ME.cat), lambda: {"a": (x := voxels()), "b": x}),
        call(
            "ME.MinkowskiConvolution.forward(coordinates)",
            layers["MinkowskiConvolution"],
            lambda: {"input": voxels(), "coordinates": COORDS},
            input=own,
            coordinates="none",
        ),
        call(
            "ME.MinkowskiInterpolation.forward",
            ME.MinkowskiInterpolation(),
            lambda: {"input": voxels(), "tfield": COORDS + 0.5},
            input=own,
        ),
        call(
            "ME.MinkowskiBroadcast.forward",
            ME.MinkowskiBroadcastAddition(),
            lambda: {"input": (x := voxels()), "input_glob": ME.MinkowskiGlobalPooling()(x)},
            input=own,
            input_glob=own,
        ),
        call(
            "ME.KernelGenerator",
            ME.KernelGenerator,
            lambda: {**window, "region_type": ME.RegionType.HYPER_CUBE, "region_offsets": None},
            region_offsets="none",
        ),
        call("ME.CoordinateManager", ME.CoordinateManager, lambda: {"D": 3}),
        call(
            "ME.CoordinateManager.insert_and_map",
            ME.CoordinateManager(D=3).insert_and_map,
            lambda: {"coordinates": COORDS, "tensor_stride": 1},
        ),
        call(
            "ME.CoordinateManager.stride",
            manager.stride,
            lambda: {"coordinate_map_key": manager.get_coordinate_map_keys(1)[0], "stride": 2},
        ),
        call(
            "ME.CoordinateManager.kernel_map",
            manager.kernel_map,
            lambda: {"in_key": 1, "out_key": 1, "stride": 1, "kernel_size": 3, "dilation": 1},
        ),
        call(
            "ME.CoordinateMapKey",
            ME.CoordinateMapKey,
            lambda: {"size_or_stride": [1, 1, 1], "string_id": ""},
            string_id="none,string",
        ),
        call(
            "ME.to_sparse",
            ME.to_sparse,
            lambda: {"x": torch.ones(1, 2, 3, 3), "format": None},
            format="none",
            x="other shape",
        ),
        call(
            "ME.to_sparse_all",
            ME.to_sparse_all,
            lambda: {"dense_tensor": torch.ones(1, 2, 3, 3)},
            dense_tensor="other shape",
        ),
        call(
            "ME.batched_coordinates",
            batched_coordinates,
            lambda: {"coords": [COORDS[:, 1:]], "dtype": torch.int32},
            coords="other shape",
        ),
        call(
            "ME.sparse_collate",
            sparse_collate,
            lambda: {"coords": [COORDS[:, 1:]], "feats": [rows()], "labels": None},
            labels="none",
        ),
        call(
            "ME.sparse_quantize",
            quantization.sparse_quantize,
            lambda: {
                "coordinates": torch.rand(5, 3),
                "features": torch.rand(5, 2),
                "labels": None,
                "quantization_size": 0.5,
                "device": "cpu",
            },
            coordinates="ndarray",
            features="none",
            labels="none",
            quantization_size="none,float,huge,scalar tensor",
        ),
        call("ME.MinkowskiBatchNorm", ME.MinkowskiBatchNorm, lambda: {"num_features": 4}),
        call("ME.MinkowskiLinear", ME.MinkowskiLinear, lambda: {"in_features": 4, "out_features": 6}),
        call(
            "ME.spmm",
            ME.MinkowskiSPMMFunction.apply,
            lambda: {
                "rows": torch.tensor([0, 1]),
                "cols": torch.tensor([1, 0]),
                "vals": torch.ones(2),
                "size": torch.Size([2, 2]),
                "mat": torch.ones(2, 3),
            },
        ),
    ]


# ---- torchsparse


def sparse() -> torchsparse.SparseTensor:
    return torchsparse.SparseTensor(rows(), COORDS)


def _torchsparse() -> list[Call]:
    own = "torchsparse tensor"
    layers: dict[str, torch.nn.Module] = {
        "Conv3d": spnn.Conv3d(4, 6, 3),
        "Conv3d(1)": spnn.Conv3d(4, 6, 1),
        "Conv3d(stride)": spnn.Conv3d(4, 6, 2, 2),
        "Conv3d(generative)": spnn.Conv3d(4, 6, 2, transposed=True, generative=True),
        "BatchNorm": spnn.BatchNorm(4),
        "GroupNorm": spnn.GroupNorm(2, 4),
        "ReLU": spnn.ReLU(),
        "GlobalAvgPool": spnn.GlobalAvgPool(),
        "SparseCrop": spnn.SparseCrop((0, 0, 0), (3, 3, 3)),
    }
    found = [
        call(f"spnn.{name}.forward", layer, lambda: {"input": sparse()}, input=own) for name, layer in layers.items()
    ]
    points = torch.rand(6, 4)
    near = torch.randint(0, len(COORDS), (6, 8))
    return [
        *found,
        call(
            "spnn.Conv3d",
            spnn.Conv3d,
            lambda: {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 1, "padding": 0, "dilation": 1},
            padding="negative",
        ),
        call(
            "torchsparse.SparseTensor",
            torchsparse.SparseTensor,
            lambda: {"feats": rows(), "coords": COORDS, "stride": 1, "spatial_range": (1, 5, 5, 5)},
            spatial_range="none",
            feats="ndarray,complex tensor,bool tensor,meta tensor,other shape,scalar tensor",
            coords="ndarray,complex tensor,bool tensor,meta tensor,other shape,scalar tensor",
        ),
        call(
            "torchsparse.SparseTensor.dense",
            lambda range: torchsparse.SparseTensor(rows(), COORDS, 1, range).dense(),
            lambda: {"range": (1, 5, 5, 5)},
        ),
        call(
            "torchsparse.SparseTensor.__add__", lambda other: sparse() + other, lambda: {"other": sparse()}, other=own
        ),
        call(
            "torchsparse.cat",
            lambda a, b: torchsparse.cat([a, b]),
            lambda: {"a": sparse(), "b": sparse()},
            a=own,
            b=own,
        ),
        call(
            "torchsparse.generative_add",
            by_place(torchsparse.generative_add),
            lambda: {"a": sparse(), "b": sparse()},
            a=own,
            b=own,
        ),
        call(
            "spf.conv3d",
            spf.conv3d,
            lambda: {
                "input": sparse(),
                "weight": torch.ones(27, 4, 6),
                "kernel_size": 3,
                "bias": torch.ones(6),
                "stride": 1,
                "padding": 1,
                "dilation": 1,
            },
            input=own,
            bias="none",
            padding="negative",
        ),
        call("spf.sphash", spf.sphash, lambda: {"coords": COORDS}),
        call(
            "spf.sphashquery",
            spf.sphashquery,
            lambda: {"queries": torch.tensor([5, 9]), "references": torch.tensor([7, 5])},
        ),
        call("spf.spcount", spf.spcount, lambda: {"coords": torch.tensor([0, 1, 1]), "num": 2}),
        call(
            "spf.spvoxelize",
            spf.spvoxelize,
            lambda: {"feats": torch.ones(3, 2), "coords": torch.tensor([0, 1, 1]), "counts": torch.tensor([1, 2])},
        ),
        call(
            "spf.calc_ti_weights",
            spf.calc_ti_weights,
            lambda: {"coords": points, "idx_query": near, "scale": 1},
            scale="float,huge,scalar tensor",
        ),
        call(
            "spf.spdevoxelize", spf.spdevoxelize, lambda: {"feats": rows(), "coords": near, "weights": torch.rand(6, 8)}
        ),
        call("spf.spdownsample", spf.spdownsample, lambda: {"coords": COORDS, "stride": 2}),
        call(
            "spf.spcrop",
            spf.spcrop,
            lambda: {"input": sparse(), "coords_min": (0, 0, 0), "coords_max": (3, 3, 3)},
            input=own,
            coords_min="none,negative",
            coords_max="none,negative",
        ),
        call("spf.relu", spf.relu, lambda: {"input": sparse()}, input=own),
        call("spf.global_avg_pool", spf.global_avg_pool, lambda: {"inputs": sparse()}, inputs=own),
        call(
            "torchsparse.sparse_quantize",
            quantize.sparse_quantize,
            lambda: {"coords": np.ones((5, 3)), "voxel_size": 0.5},
            coords="ndarray",
            voxel_size="float,huge,scalar tensor",
        ),
        call(
            "torchsparse.sparse_collate",
            lambda x: collate.sparse_collate([x]),
            lambda: {"x": torchsparse.SparseTensor(rows(), COORDS[:, 1:])},
            x=own,
        ),
        call(
            "torchsparse.PointTensor",
            torchsparse.PointTensor,
            lambda: {"feats": rows(), "coords": points},
            feats=",".join(KINDS),
            coords=",".join(KINDS),
        ),
    ]


# ---- FlexGEMM


def _flex_gemm() -> list[Call]:
    shape, functions = (1, 4, *SHAPE), flex_gemm.ops.spconv
    first = {"feats": rows, "coords": COORDS.clone, "shape": lambda: shape}
    weight = {"weight": lambda: torch.ones(6, 3, 3, 3, 4), "bias": lambda: torch.ones(6)}

    def given(*groups: dict[str, Any], **more: Any) -> Any:
        return lambda: {key: make() for group in groups for key, make in group.items()} | more

    return [
        call(
            "flex_gemm.sparse_submanifold_conv3d",
            functions.sparse_submanifold_conv3d,
            given(first, weight, neighbor_cache=None, dilation=1),
            bias="none",
            neighbor_cache="none",
        ),
        call(
            "flex_gemm.sparse_conv3d",
            functions.sparse_conv3d,
            given(first, weight, out_coords=None, stride=2, padding=1, dilation=1),
            bias="none",
            out_coords="none",
            padding="negative",
        ),
        call(
            "flex_gemm.grid_sample_3d",
            flex_gemm.ops.grid_sample.grid_sample_3d,
            given(first, grid=torch.rand(1, 6, 3), mode="trilinear"),
        ),
        call("flex_gemm.encode_seq", flex_gemm.ops.serialize.encode_seq, given({"coords": COORDS.clone}, shape=shape)),
        call(
            "flex_gemm.decode_seq",
            flex_gemm.ops.serialize.decode_seq,
            given(code=torch.arange(6), shape=shape),
        ),
        call("flex_gemm.set_algorithm", functions.set_algorithm, given(algorithm="implicit_gemm")),
    ]


# ---- fVDB


def _fvdb() -> list[Call]:
    grid = fvdb.GridBatch.from_voxel_grid(GRID)
    plan = fvdb.ConvolutionPlan.from_grid_batch(3, 1, grid)
    found = [
        call(
            f"fvdb.{name}",
            getattr(fvdb.ConvolutionPlan, name),
            lambda: {
                "kernel_size": 3,
                "stride": 2,
                "source_grid": grid,
                "target_grid": None,
                "expert_config": None,
                "channel_pairs": ((4, 6),),
                "topology_policy": None,
            },
            source_grid="grid",
            target_grid="none",
            expert_config="none,dict",
            topology_policy="none",
        )
        for name in ("from_grid_batch", "from_grid_batch_transposed")
    ]
    return [
        *found,
        call("fvdb.from_plan_transposed", fvdb.ConvolutionPlan.from_plan_transposed, lambda: {"plan": plan}),
        call("fvdb.execute", plan.execute, lambda: {"data": rows(), "weights": torch.ones(6, 4, 3, 3, 3)}),
        call(
            "fvdb.GridBatch.from_ijk",
            fvdb.GridBatch.from_ijk,
            lambda: {"ijk": fvdb.JaggedTensor(COORDS[:, 1:]), "voxel_sizes": 0.5, "origins": 0},
            voxel_sizes="float,huge,scalar tensor",
            origins="float,negative,huge,scalar tensor",
        ),
        call("fvdb.GridBatch.conv_grid", grid.conv_grid, lambda: {"kernel_size": 3, "stride": 2}),
        call(
            "fvdb.nn.SparseConv3d",
            fvdb.nn.SparseConv3d(4, 6, 3),
            lambda: {"data": fvdb.JaggedTensor(rows()), "plan": plan},
        ),
    ]


TABLE: list[Call] = [*_spconv(), *_minkowski(), *_torchsparse(), *_flex_gemm(), *_fvdb()]


def main(count: int, seed: int) -> list[str]:
    """Draw ``count`` bad calls, each once at most; return what is wrong with their answers."""
    return wrong_answers(TABLE, count, seed, KINDS)
