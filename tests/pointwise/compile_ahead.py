"""Compile kernels for a Hopper GPU where there is none: ``python -m tests.pointwise.compile_ahead NAMES``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.compiler import ASTSource, compile

from sparseconv.pointwise import PointwiseDynamicFunction
from sparseconv.pointwise.kernel import codegen
from sparseconv.pointwise.operations import activations, arithmetic, batch, gated, seeded
from tests.backends.aot import target_of


def library() -> dict[str, PointwiseDynamicFunction]:
    found = {}
    for room in (activations, arithmetic, batch, gated, seeded):
        found.update({f.schema.name: f for f in vars(room).values() if isinstance(f, PointwiseDynamicFunction)})
    return found


def compile_kernel(function: PointwiseDynamicFunction, rank: int, element: str, compute: Any, arch: int | str) -> str:
    """The PTX or AMD's text of one kernel whose tensors are of one dtype (those that gather are of int32)."""
    flags = function.schema.is_tensor
    types = tuple(None if t else (k or float) for t, k in zip(flags, function.schema.scalar_types))
    schema = replace(function.schema, scalar_types=types)
    overload = function.instantiate(rank)
    items = {source for _, source in schema.gather}
    numbers = {float: ("fp64", compute), int: ("i64", tl.int64), bool: ("u1", tl.int1)}
    signature, constants = {}, {}
    for name in codegen.parameters(schema, rank, overload.config):
        known: Any = None
        if name.endswith("_ptr"):
            signature[name] = "*i32" if name[:2] == "in" and int(name[2:-4]) in items else f"*{element}"
            continue
        if name.startswith("val"):
            signature[name] = numbers[types[int(name[3:])]][0]
            continue
        if name in ("ADDRESS", "PARTS", "FULL"):
            known = {"ADDRESS": tl.int32, "PARTS": 2, "FULL": False}[name]
        elif name.startswith("TILE"):
            known = 1024 if rank == 1 else 32
        elif "VARIES" in name:
            known = not (name.endswith(f"VARIES{rank - 2}") and rank > 1)
        elif name.startswith("IN"):
            known = tl.int32 if int(name[2:]) in items else compute
        elif name.startswith("VAL"):
            known = numbers[types[int(name[3:])]][1]
        signature[name] = "i32" if known is None else "constexpr"
        if known is not None:
            constants[name] = known
    made = compile(
        ASTSource(fn=overload.kernel(types), signature=signature, constexprs=constants),
        target=target_of(arch),
    )
    return made.asm["ptx" if isinstance(arch, int) else "amdgcn"]


def main(words: list[str]) -> None:
    functions = library()
    archs = [word if word[:3] == "gfx" else int(word) for word in words if word not in functions]
    for name in [word for word in words if word in functions] or sorted(functions):
        for rank, element, compute in ((1, "fp16", tl.float32), (2, "fp64", tl.float64)):
            for arch in archs or [90]:
                target = f".target sm_{arch}" if isinstance(arch, int) else arch
                if target not in compile_kernel(functions[name], rank, element, compute, arch):
                    raise SystemExit(f"{name}: no kernel for {arch}")


if __name__ == "__main__":
    main(sys.argv[1:])
