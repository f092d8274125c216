"""The text of kernels against golden files, and what it depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sparseconv.pointwise import Config
from sparseconv.pointwise.kernel.codegen import kernel_name, parameters, source
from sparseconv.pointwise.schema import Schema, make_schema

GOLDEN = Path(__file__).parent / "golden"


def schema(name: str, **given) -> Schema:
    settled = {
        "is_tensor": None,
        "dtypes": None,
        "num_inputs": None,
        "num_outputs": None,
        "index": False,
        "gather": None,
    }
    return make_schema(name, **{**settled, "promotion_methods": [(0, "DEFAULT")], **given})


CASES = {
    "relu_rank1": (schema("relu", num_inputs=1), 1, Config()),
    "axpy_rank2": (schema("axpy", is_tensor=[True, True, False], dtypes=[None, None, float]), 2, Config()),
    "polar_rank3": (schema("polar", num_inputs=2, promotion_methods=[(0, "DEFAULT")] * 2), 3, Config()),
    "rows_rank2": (schema("rows", num_inputs=3, gather={2: 1}), 2, Config()),
    "dropout_rank4_narrow": (
        schema("dropout", is_tensor=[True, False, False], dtypes=[None, float, int], index=True),
        4,
        Config(tile_axes=1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_golden_file(name, request):
    """To accept a change on purpose, delete the file and run the test twice."""
    text = source(*CASES[name])
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path} did not exist and was written")
    assert text == path.read_text()


@pytest.mark.parametrize("rank", range(9))
@pytest.mark.parametrize("tile_axes", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gives_a_function_of_the_named_parameters(name, rank, tile_axes):
    given, config = CASES[name][0], Config(tile_axes=tile_axes)
    tree = ast.parse(source(given, rank, config))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.name == kernel_name(given, rank)
    names = [a.arg for a in function.args.args]
    assert names == parameters(given, rank, config)
    assert len(set(names)) == len(names)
    assert source(given, rank, config) == source(given, rank, config)


def test_the_text_depends_on_the_kinds_of_numbers_and_not_on_tile_sizes():
    base = schema("f", is_tensor=[True, False], dtypes=[None, float])
    whole = schema("f", is_tensor=[True, False], dtypes=[None, int])
    assert source(base, 2, Config()) != source(whole, 2, Config())
    assert source(base, 2, Config()) == source(base, 2, Config(elements=128, num_warps=8))
    assert source(base, 2, Config()) != source(base, 2, Config(tile_axes=1))
    with pytest.raises(ValueError, match="must be resolved"):
        source(schema("f", is_tensor=[True, False]), 1, Config())


def test_no_block_pointers():
    """A zero stride is legal in plain pointer arithmetic, and is not in a block pointer."""
    assert not any("block_ptr" in source(*case) for case in CASES.values())
