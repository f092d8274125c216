"""Shapes and dtypes in annotations: every public tensor has one, and they hold in every call of the examples."""

from __future__ import annotations

import collections.abc
import dis
import doctest
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import jaxtyping
import pytest
import torch
import torch.distributed as dist
from jaxtyping import AbstractArray, Shaped, jaxtyped

from sparseconv import ConvolutionPlan, IndexProjection, KernelMap, SparseTensor, VoxelGrid, nn
from sparseconv.distributed import Exchange, ShardedConvolutionPlan, shard
from sparseconv.geometry import FixedGrid
from sparseconv.nn import LinearEmbedding
from sparseconv.ops import Interpolation, Patches, PointGroups
from sparseconv.pointwise import StridedBuffer
from sparseconv.products import SparseProductInfo, SparseScaleInfo
from sparseconv.quantization import Rescale
from tests.docs.surface import public_fields, public_functions

ROOT = Path(__file__).parents[2]
SHAPE = re.compile(r"""\b[A-Z]\w+\[(?:torch\.Tensor|np\.ndarray), (['"]) ?(.*?)\1\]""")
#: words of shapes beside the letters of docs/api/shapes.md
WORDS = {"shape", "kernel", "counts", "gate", "patches", "slots", "rows", "columns", "pixels", "out_size"}


def annotations() -> Iterator[tuple[str, str]]:
    """(where, text) of every annotation of the public surface."""
    for name, function in public_functions().items():
        yield from ((f"{name}: {part}", str(text)) for part, text in function.__annotations__.items())
    yield from ((name, str(text)) for name, text in public_fields().items())


def test_every_public_tensor_has_a_shape():
    """``torch.Tensor`` alone says nothing: ``Shaped[torch.Tensor, "..."]`` says that any shape will do."""
    bare = [where for where, text in annotations() if re.search(r"\b(Tensor|ndarray)\b", SHAPE.sub("", text))]
    assert bare == []


def test_letters_of_shapes_are_explained():
    table = (ROOT / "docs" / "api" / "shapes.md").read_text().partition("The letters:")[2]
    letters = {letter for row in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE) for letter in row.split(", ")}
    used = {
        name.removeprefix("_")
        for _, text in annotations()
        for _, dims in SHAPE.findall(text)
        for name in re.findall(r"[A-Za-z_]\w*", dims)
    }
    assert used - letters - WORDS == set()


# ---- whether they are true


def sizes_known(given: Mapping[str, Any]) -> dict[str, int | None]:
    """Sizes that plans, grids and numbers among the arguments say, by their letters."""
    found: dict[str, int | None] = {"G": given.get("groups"), "N": given.get("num_voxels")}
    for name, value in given.items():
        if isinstance(value, ShardedConvolutionPlan):
            found["G"] = value.groups
        if isinstance(value, ConvolutionPlan):
            found |= {"G": value.groups, "D": value.source.rank}
        if isinstance(value, ConvolutionPlan | KernelMap):
            found |= {"N_in": value.num_in, "K": value.num_taps}
            found |= {"N_out": value.num_out if isinstance(value, KernelMap) else value.kernel_map.num_out}
        grid = value.grid if isinstance(value, SparseTensor) else value
        if isinstance(grid, VoxelGrid) and name != "like":
            found |= {"N": len(grid), "B": grid.batch_size, "D": grid.rank}
        if isinstance(value, Interpolation | PointGroups):
            found |= {"N": value.num_voxels, "M": value.num_points, "D": getattr(value, "rank", None)}
        if isinstance(value, Rescale) and hasattr(value, "multiplier"):
            found["C_out"] = len(value.multiplier)
        if isinstance(value, Patches):
            found |= {"patches": value.num_patches, "slots": value.size, "N": value.num_rows}
        if isinstance(value, SparseScaleInfo | SparseProductInfo) and name in ("info", "info_fwd"):
            found["out_size"] = value.num_rows
    return found


class Sizes:
    """What letters stand for in one call: jaxtyping compares, and is told what it can evaluate and not solve."""

    def __init__(self, known: Mapping[str, int | None]) -> None:
        self.bound: dict[str, int] = {}
        for name, size in known.items():
            if size is not None:
                self.bind(name, size)

    def bind(self, name: str, size: int) -> None:
        assert isinstance(torch.empty(size, 0), Shaped[torch.Tensor, f"{name} _"])
        self.bound[name] = size

    def solve(self, dim: str, size: int) -> None:
        """Bind the letter of ``1+D``, ``K+1`` or ``C_in/G``."""
        for pattern, value in (
            (r"1\+(\w+)", size - 1),
            (r"(\w+)\+1", size - 1),
            (r"(\w+)/G", size * self.bound.get("G", 1)),
        ):
            if (found := re.fullmatch(pattern, dim)) and found[1] not in self.bound:
                self.bind(found[1], value)

    def fits_shape(self, value: Any, hint: type[AbstractArray]) -> bool:
        if not isinstance(value, hint.array_type):
            return False
        dims = hint.dim_str.split()
        tail = next((at + 1 for at, dim in enumerate(dims) if dim.startswith("*") or dim == "..."), 0)
        pairs = list(zip(dims[tail:], value.shape[len(value.shape) - len(dims) + tail :]))
        for dim, size in pairs:
            if isinstance(size, int):  # and not that of a jagged axis
                self.solve(dim, size)
        fitting = isinstance(value, hint)
        self.bound |= {dim: size for dim, size in pairs if fitting and dim.isidentifier()}
        return fitting

    def fits(self, value: Any, hint: Any) -> bool:
        """Whether a value is what its annotation says; what speaks of no tensor is not asked."""
        kind, parts = typing.get_origin(hint), typing.get_args(hint)
        if isinstance(hint, type) and issubclass(hint, AbstractArray):
            return self.fits_shape(value, hint)
        if kind in (typing.Union, types.UnionType):
            return any(self.fits(value, part) for part in parts)
        if kind is tuple and parts[-1] is not ...:
            return isinstance(value, tuple) and len(value) == len(parts) and all(map(self.fits, value, parts))
        if kind in (tuple, list, collections.abc.Sequence):
            return isinstance(value, kind) and all(self.fits(item, parts[0]) for item in value)
        if kind is collections.abc.Mapping:
            return isinstance(value, kind) and all(self.fits(item, parts[1]) for item in value.values())
        return not isinstance(hint, type) or isinstance(value, (int, float) if hint is float else hint)


NAMES = {**vars(collections.abc), **vars(typing), **vars(jaxtyping)}


@cache
def hints(function: FunctionType) -> dict[str, Any]:
    """The annotations that name a shape, evaluated with jaxtyping's names, which no module has when it runs."""
    texts = {name: text for name, text in function.__annotations__.items() if SHAPE.search(str(text))}
    return {name: eval(text, {**NAMES, **function.__globals__}) for name, text in texts.items()}


def is_symbolic(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not value.is_nested
    return plain and not all(isinstance(size, int) for size in value.shape)


class Watch:
    """Compares arguments and results of public functions with their annotations, wherever they are called."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, tuple[str, FunctionType]] = {
            function.__code__: (name, function) for name, function in public_functions().items() if hints(function)
        }
        self.called: set[str] = set()
        self.wrong: set[str] = set()
        self.arguments: dict[FrameType, dict[str, Any]] = {}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if frame.f_code not in self.functions:
            return
        if event == "call":
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            self.arguments[frame] = {name: frame.f_locals[name] for name in names}
        elif event == "return" and (given := self.arguments.pop(frame, None)) is not None:
            returned = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
            if returned and not torch.compiler.is_compiling():
                sys.setprofile(None)
                try:
                    self.compare(*self.functions[frame.f_code], given, result)
                finally:
                    sys.setprofile(self)

    def compare(self, name: str, function: FunctionType, given: dict[str, Any], result: Any) -> None:
        if any(map(is_symbolic, [*given.values(), result])):
            return
        self.called.add(name)
        with jaxtyped("context"):
            sizes = Sizes(sizes_known(given))
            for part, hint in hints(function).items():
                value = result if part == "return" else given[part]
                if not sizes.fits(value, hint):
                    self.wrong.add(f"{name}: {part} is {function.__annotations__[part]}, but was {described(value)}")


def described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else repr(value)


VERBS = ["forward", "input_grad", "input_grad_onto", "weight_grad"]
VERBS += ["gradients", "integers", "float8"]
#: public functions with shapes that are called neither by an example nor by `more_calls`
UNCALLED = {
    "sparseconv.export.gpu_package.package_for_gpu",  # on a GPU
    # their examples trace a network, or capture a step, which takes minutes while each call is watched
    "sparseconv.export.program.export",
    "sparseconv.nn.captured_step.capture_step",
    "sparseconv.geometry.fixed_grid.FixedGrid.batch_rows",  # raises
    "sparseconv.geometry.kernel_map.KernelMap.half_pairs",  # of maps on a GPU
    *(f"sparseconv.backends.base.Backend.{verb}" for verb in VERBS),  # what backends have for themselves
}


def more_calls() -> None:
    """Public functions that have a shape and no example of their own."""
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [1, 1, 1]])
    grid, features = VoxelGrid(coords), torch.rand(3, 5)
    x = SparseTensor(grid, features)
    for item in (grid.sorted("morton"), grid.batch_offsets, VoxelGrid.from_dense(torch.ones(2, 3, 4, 5))):
        assert item is not None
    SparseTensor.from_dense(x.to_dense())
    SparseTensor.from_list([coords[:2, 1:], coords[2:, 1:]], x.to_list())
    SparseTensor.from_nested(grid, x.to_nested())
    fixed = FixedGrid(coords.int(), torch.tensor([3], dtype=torch.int32), grid)
    assert fixed.batch_counts.tolist() == [2, 1]
    fixed.to_dense(features)
    fixed.end_at(torch.tensor([5, 5], dtype=torch.int32))
    ConvolutionPlan(fixed, 2, stride=2)
    plan = ConvolutionPlan(grid, 3)
    assert plan.coverage.sum() == 3
    plan.explain(features, torch.rand(9, 5, 2))
    plan.execute(features, torch.rand(9, 5, 2), residual=torch.rand(3, 2))
    projection = IndexProjection(((2, 0), (0, 2)), (-1, -1), (3, 3), anchors={"middle": (0, 0)})
    points = torch.tensor([[0, 0], [1, 1]])
    projection.anchor("middle", points)
    projection.gather(torch.rand(6, 6), points, "absent")
    StridedBuffer(torch.zeros(3)).copy_(torch.ones(3))
    Rescale(torch.ones(5, dtype=torch.int32), 8).packed(None)
    mask = torch.tensor([True, False, False])
    LinearEmbedding(5, 8, mask_token=True)(x, mask)
    solid = SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 3, 1, 2]])), torch.rand(2, 4))
    nn.SpUNet(4, 3, channels=(4, 4, 4, 4), layers=(1, 1, 1, 1), base_channels=4).eval()(solid)


def sharded_calls() -> None:
    """As `more_calls`, in a group of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    grid, features = shard(torch.tensor([[0, 0, 0], [0, 0, 1]])), torch.rand(2, 5, requires_grad=True)
    grid.gather(features)
    grid.subset(torch.tensor([True, False]))
    grid.all_sum(features)
    ShardedConvolutionPlan.transposed(grid, 2, stride=2).localize(features)
    Exchange(None, torch.tensor([1]), (1,), (1,), 2)(features).sum().backward()
    dist.destroy_process_group()


def examples_of(module: str) -> int:
    """Run the examples of a module's docstrings; how many of them failed."""
    return doctest.testmod(import_module(module)).failed


def watched_modules() -> set[str]:
    """Whose examples run here, and nowhere else."""
    modules = {function.__module__ for function in public_functions().values() if hints(function)}
    return modules - {"sparseconv.export.program", "sparseconv.nn.captured_step"}


def test_shapes_hold_in_every_call():
    import matplotlib.pyplot  # noqa: F401 (now, and not while calls are watched)

    watch = Watch()
    runs: dict[str, Any] = {name: partial(examples_of, name) for name in sorted(watched_modules())}
    failed = []
    for name, run in {**runs, "more": more_calls, "sharded": sharded_calls}.items():
        sys.setprofile(watch)
        try:
            failed += [name] if run() else []
        finally:
            sys.setprofile(None)
    assert failed == []
    assert watch.wrong == set()
    assert {name for name, _ in watch.functions.values()} - watch.called == UNCALLED


@pytest.mark.parametrize(
    ("hint", "shape", "fits"),
    [("N 1+D", (4, 3), True), ("N C", (4,), False), ("N N", (4, 3), False), ("K C_in/G C_out", (9, 2, 8), True)],
)
def test_a_wrong_shape_is_seen(hint, shape, fits):
    with jaxtyped("context"):
        assert Sizes({"D": 2, "G": 2, "C_in": 4}).fits(torch.zeros(shape), Shaped[torch.Tensor, hint]) == fits
