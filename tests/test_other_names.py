"""Errors of names that other libraries have say what to use here, and that exists."""

from __future__ import annotations

import operator
import re
from importlib import import_module

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.other_names import ARGUMENTS, ATTRIBUTES, MODULES
from tests.forked import printed

GRID = sc.VoxelGrid(torch.tensor([[0, 1, 2], [0, 1, 3]]))
TENSOR = sc.SparseTensor(GRID, torch.zeros(2, 3))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_other_sparse_tensors(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': use x.") as error:
        getattr(TENSOR, name)
    there = re.search(r"use x\.([\w.]+)", str(error.value))[1]
    assert operator.attrgetter(there)(TENSOR) is not None


def test_an_attribute_that_nobody_has():
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        TENSOR.nonsense
    assert not hasattr(TENSOR, "is_cuda")


def test_every_module_that_is_named_exists():
    assert [name for name in MODULES.values() if name not in nn.__all__] == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SubMConv3d", "use sparseconv.nn.SubmanifoldConv"),
        ("SubMConv2d", "use sparseconv.nn.SubmanifoldConv, with rank=2"),
        ("SparseInverseConv3d", "use sparseconv.nn.InverseConv"),
        ("SparseSequential", "use sparseconv.nn.Sequential"),
        ("MinkowskiConvolution", "use sparseconv.nn.Conv"),
        ("Conv3d", "use sparseconv.nn.Conv; of dense tensors it is torch.nn.Conv3d"),
        ("BatchNorm1d", "use sparseconv.nn.BatchNorm; of dense tensors it is torch.nn.BatchNorm1d"),
        ("Parameter", "torch's is torch.nn.Parameter"),
    ],
)
def test_modules_of_other_libraries(name, advice):
    with pytest.raises(AttributeError) as error:
        getattr(nn, name)
    assert str(error.value) == f"module 'sparseconv.nn' has no attribute '{name}': {advice}"


def test_a_module_that_nobody_has():
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        nn.nonsense


def test_features_of_points_in_the_place_of_voxels():
    plan = sc.ConvolutionPlan(GRID, 3)
    for use in (lambda x: sc.SparseTensor(GRID, x), lambda x: plan.execute(x, torch.zeros(9, 3, 1))):
        with pytest.raises(ValueError, match=r"got \(5, 3\): sparseconv.ops.voxelize_features\(features, point_rows"):
            use(torch.zeros(5, 3))


def test_features_before_the_grid():
    with pytest.raises(TypeError, match=r"the grid comes first, SparseTensor\(grid, features\)"):
        sc.SparseTensor(torch.zeros(2, 3), GRID)


def test_both_results_of_voxelize_in_the_place_of_the_grid():
    both = sc.voxelize(torch.rand(5, 2), 0.5)
    for use in (lambda: sc.ConvolutionPlan(both, 3), lambda: sc.SparseTensor(both, torch.zeros(5, 3))):
        with pytest.raises(TypeError, match="voxelize returns two things, grid, point_rows ="):
            use()


def test_coords_in_the_place_of_a_target():
    with pytest.raises(TypeError, match=r"got .{1,80}: pass VoxelGrid\(coords\)"):
        sc.ConvolutionPlan(GRID, 3, target=torch.zeros(500, 3, dtype=torch.int32))


def test_a_linear_layer_names_its_channels():
    with pytest.raises(ValueError, match=r"Linear was made for 5 channels; got features \(2, 3\)"):
        nn.Linear(5, 2)(TENSOR)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("sum", "use sparseconv.nn.GlobalSumPool or GlobalAvgPool, or take x.features"),
        ("max", "use sparseconv.nn.GlobalMaxPool"),
        ("relu", r"use torch.relu\(x\)"),
        ("argmax", "use x.features.argmax"),
        ("numpy", "use x.features.numpy"),
        ("backward", "use x.features.backward"),
    ],
)
def test_methods_of_tensors(name, advice):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': {advice}"):
        getattr(TENSOR, name)


LAYERS = {name: getattr(nn, name) for name in ("Conv", "ConvTranspose", "InverseConv", "SubmanifoldConv")}
POOLS = {name: getattr(nn, name) for name in ("AvgPool", "MaxPool", "MaxUnpool", "SumPool", "Unpool")}


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_arguments_of_other_layers(layer, argument):
    with pytest.raises(TypeError, match=f"^{layer} got an unexpected .*'{argument}': {re.escape(ARGUMENTS[argument])}"):
        LAYERS[layer](4, 8, 3, **{argument: 1})


@pytest.mark.parametrize("layer", [*LAYERS, *POOLS])
def test_arguments_that_do_not_fit_name_the_class_that_was_called(layer):
    make, sizes = (LAYERS[layer], (4, 8, 3)) if layer in LAYERS else (POOLS[layer], (3,))
    with pytest.raises(TypeError, match=f"^{layer} got an unexpected keyword argument 'strides': use stride="):
        make(*sizes, strides=2)
    with pytest.raises(TypeError, match=f"^{layer} got an unexpected .*: it takes .*kernel_size, stride, padding"):
        make(*sizes, nonsense=2)
    with pytest.raises(TypeError, match=f"^{layer} too many positional arguments: it takes"):
        make(*sizes, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"no backend 'cuda'; there are .* grid.to"):
        make(*sizes, backend="cuda")
    with pytest.raises(ValueError, match=r"a periodic boundary needs its extent: Boundary.periodic"):
        make(*sizes, boundary="periodic")
    with pytest.raises(ValueError, match="'negative' is for dense arrays"):
        make(*sizes, boundary="negative")
    named = type("Named", (make,), {})
    with pytest.raises(TypeError, match=r"^Named got an unexpected"):
        named(*sizes, nonsense=1)


@pytest.mark.parametrize("layer", [*LAYERS, *POOLS])
def test_stride_and_padding_follow_the_kernel_by_position(layer):
    make, sizes = (LAYERS[layer], (4, 8, 3)) if layer in LAYERS else (POOLS[layer], (3,))
    stride = 1 if layer == "SubmanifoldConv" else 2
    made = make(*sizes, stride, 0).geometry
    assert (made.stride, made.padding) == ((stride,) * 3, (0,) * 3)


def test_a_layer_without_channels_says_what_it_takes():
    with pytest.raises(TypeError, match=r"^Conv missing a required argument: 'in_channels': it takes in_channels, out"):
        nn.Conv()
    with pytest.raises(TypeError, match="has no stride"):
        nn.SubmanifoldConv(4, 8, 3, 2)
    nn.SubmanifoldConv(4, 8, 3, (1, 1, 1))
    with pytest.raises(ValueError, match="target is 'full' or None here"):
        nn.MaxPool(2, target="whole")


def test_a_plan_that_is_called_names_execute():
    with pytest.raises(TypeError, match=r"plan.execute\(x, weight\)"):
        sc.ConvolutionPlan(GRID, 3)(TENSOR.features, torch.zeros(9, 3, 4))


def test_plans_know_the_largest_buffer_by_both_names():
    plan = sc.ConvolutionPlan(GRID, 3)
    assert plan.max_buffer_size == plan.max_pairs_per_tap == 2


def test_devices_that_differ_say_what_to_move():
    plan, x, w = sc.ConvolutionPlan(GRID, 3), TENSOR.features, torch.zeros(9, 3, 4)
    with pytest.raises(ValueError, match=r"x is on meta: move it, or the plan, plan.to\('meta'\)"):
        plan.execute(x.to("meta"), w)
    with pytest.raises(ValueError, match=r"weight is on meta: move it, a network by net.to\('cpu'\), or the scene"):
        plan.execute(x, w.to("meta"))
    with pytest.raises(ValueError, match=r"features are on meta, the grid is on cpu: move it, grid.to\('meta'\)"):
        sc.SparseTensor(GRID, x.to("meta"))


FACES = {
    "spconv": "spconv",
    "MinkowskiEngine": "minkowski",
    "torchsparse": "torchsparse",
    "flex_gemm": "flex_gemm",
    "fvdb": "fvdb",
}


@pytest.mark.parametrize("library", FACES)
def test_submodules_of_a_drop_in_are_found_under_both_names(library):
    """By every form of import, which asks for an attribute of the module above where it names the result."""
    code = f"""
import sys
from importlib import import_module
from sparseconv.interop import {FACES[library]} as ours
ours.install(force=True)
names = [name for name in sys.modules if name.startswith("{library}.")]
assert len(names) > 5
for name in [*names, *(name.replace("{library}", ours.__name__, 1) for name in names)]:
    exec(f"import {{name}} as found", there := {{}})
    above, _, last = name.rpartition(".")
    exec(f"from {{above}} import {{last}}", there)
    assert there["found"] is there[last], name
ours.uninstall()
assert not [name for name in sys.modules if name.split(".")[0] == "{library}"]
"""
    printed("-c", code)


@pytest.mark.parametrize(
    ("face", "name", "advice"),
    [
        ("minkowski", "CoordsManager", "CoordinateManager"),
        ("minkowski", "CoordsKey", "CoordinateMapKey"),
        ("minkowski", "KernelRegion", "KernelGenerator"),
        ("minkowski", "clear_global_coords_man", "clear_global_coordinate_manager"),
        ("torchsparse", "sparse_quantize", "torchsparse.utils.quantize"),
        ("torchsparse", "sparse_collate_fn", "torchsparse.utils.collate"),
        ("fvdb", "SparseConvPackInfo", "ConvolutionPlan.from_grid_batch"),
        ("fvdb", "gridbatch_from_ijk", "GridBatch.from_ijk"),
    ],
)
def test_names_of_older_versions_say_what_to_write(face, name, advice):
    module = import_module(f"sparseconv.interop.{face}")
    with pytest.raises(AttributeError, match=re.escape(advice)):
        getattr(module, name)
    if "." not in advice:
        assert hasattr(module, advice)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        module.nonsense
