"""From a saved program to a package that a C++ program runs without Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparseconv.checks import check_kind
from sparseconv.files import check_archive, check_place, written_whole
from sparseconv.torch_private import compile_package, load_package, pytree

CPP = Path(__file__).parent / "cpp"
"""The folder with the C++ sources of the operators that a package calls, and their CMakeLists.txt."""
#: activations that those sources have
ACTIVATIONS = ("", "elu", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "mish", "relu", "sigmoid", "silu", "tanh")
#: how far results may be off, by the size of the largest: products are summed in another order
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: what a call of an operator in a graph names; steps with a graph of their own are of other classes
OPERATOR: Any = type(torch.ops.aten.relu.default)
#: dtypes of inputs, by torch's names for them in C++
TYPES = {
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}


def package(program: torch.export.ExportedProgram | str | Path, path: str | Path) -> Path:
    """Compile an exported program for this machine's kind of CPU, by AOTInductor; it takes up to some minutes.

    The package holds machine code, the weights, and calls of this library's operators. A C++ program links their
    sources, which are in the folder `CPP`. ``examples/cpp`` is such a program.

    Args:
        program: what `export` returned, or a file that it wrote.
        path: the file to write, whose name ends in ``.pt2``.

    Returns:
        The path.

    Raises:
        ValueError: a file that is missing or torn, a program for a GPU, operators or activations that have no C++
            source, or a package whose results on the program's example are not the program's. Nothing is written then.
        RuntimeError: this torch has no AOTInductor. Where there is no C++ compiler, torch says so.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3), voxel_size=0.1)
    >>> net = sc.nn.UNet(4, 5, channels=(8, 16)).eval()
    >>> program = sc.export.export(net, (grid.coords, torch.randn(len(grid), 4)))
    >>> package(program, "unet_cpu.pt2")  # doctest: +SKIP
    PosixPath('unet_cpu.pt2')
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ValueError(f"a package's name must end in .pt2; got {path.name!r}")
    check_place(path)
    if isinstance(program, (str, Path)):
        program = _read(Path(program))
    check_kind("program", program, torch.export.ExportedProgram, "sparseconv.export.export returns one")
    why = next(_refused(program), None)
    if why is not None:
        raise ValueError(why)
    inputs, _ = program.example_inputs
    words = " ".join(f"{TYPES[given.dtype]} {given.shape[1]}" for given in inputs)
    with written_whole(path) as made, torch.no_grad():
        if not compile_package(program, str(made), {"sparseconv_inputs": words}):
            raise RuntimeError(f"torch {torch.__version__} has no AOTInductor: use another version")
        _compare(load_package(str(made))(*inputs), program.module()(*inputs))
    return path


def _read(path: Path) -> torch.export.ExportedProgram:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            check_archive(file, path.stat().st_size)
        return torch.export.load(path)
    except Exception as error:  # torch raises any kind for a broken file
        raise ValueError(f"{path} is damaged, or was not written by sparseconv.export.export: {error}") from error


def _refused(program: torch.export.ExportedProgram) -> Iterator[str]:
    """Why a program cannot be packaged."""
    if program.example_inputs is None or [getattr(t, "ndim", 0) for t in program.example_inputs[0]] != [2, 2]:
        yield "a package is made of a program (coords, features), which keeps its example: sparseconv.export.export"
        return
    held: list[Any] = [*program.state_dict.values(), *program.constants.values(), *program.example_inputs[0]]
    places = {t.device.type for t in held if isinstance(t, torch.Tensor)}
    if places - {"cpu"}:
        yield "a package runs on the CPU: move the network and the example there before the export"
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes if isinstance(node.target, OPERATOR)):
        if node.target.namespace not in ("aten", "prims", "sparseconv"):
            yield f"{node.target} has no C++ source: a package holds torch's operators and those of exported programs"
        if str(node.target) == "sparseconv.execute.default" and node.args[7] not in ACTIVATIONS:
            yield f"the activation {node.args[7]!r} has no C++ source; there are {', '.join(ACTIVATIONS[1:])}"


def _compare(got: Any, want: Any) -> None:
    """Raise ValueError where two results differ by more than rounding."""
    for number, (mine, theirs) in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)):
        if not isinstance(theirs, torch.Tensor):
            continue
        room = TOLERANCE.get(theirs.dtype, 0.0) * float(theirs.abs().max() if theirs.numel() else 0)
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=0, atol=room, equal_nan=True):
            raise ValueError(f"the package differs from the program on the example, in result {number}")
