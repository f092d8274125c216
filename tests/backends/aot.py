"""Compile the shipped kernel configurations for cards that are not here: python -m tests.backends.aot ARCH [all].

Prints one JSON line a kernel: its name and configuration, registers' spill in bytes, shared memory in bytes, and the
matrix instructions in its text. A process of its own, since the test process interprets Triton's kernels.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparseconv.backends.triton_implicit_gemm.config import ProblemSize, conv_candidates, weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.recipe import problem_constants
from sparseconv.gpu.cuda_capability import PTX_FROM

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
EIGHT_BITS = {torch.int8: "i32", torch.float8_e4m3fn: "fp32"}  # and the type of their numbers
OPERANDS = ("feats_ptr", "weight_ptr", "weight", "grad_ptr", "bias_ptr", "residual_ptr")


def target_of(arch: int | str) -> GPUTarget:
    """NVIDIA's compute capability, 90, or AMD's architecture, "gfx942"."""
    if isinstance(arch, int):
        return GPUTarget("cuda", arch, 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def spill_bytes(kernel) -> int:
    """Bytes a thread keeps in local memory, read off the binary, or off the text for AMD's GPUs."""
    if "amdgcn" in kernel.asm:
        return sum(int(n) for n in re.findall(r"private_segment_fixed_size: (\d+)", kernel.asm["amdgcn"]))
    cubin = kernel.asm["cubin"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", text))


def compile_kernel(function, dtype: torch.dtype, constants: dict, config, arch: int | str, out=None):
    """The compiled kernel for aligned pointers and strides."""
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name == "weight" and config.tma_weights:
            from sparseconv.backends.triton_implicit_gemm.gluon import shared_layout

            tile = (constants["BLOCK_K"], constants["BLOCK_N"])[:: -1 if constants["TRANSPOSED"] else 1]
            layout = shared_layout(tile[1], constants["UNIT"])
            signature[name] = f"tensordesc<{NAMES[dtype]}[{tile[0]},{tile[1]}],{layout!r}>"
        elif name == "bias_ptr" and dtype in EIGHT_BITS:
            signature[name] = "*" + EIGHT_BITS[dtype]
        elif name in OPERANDS:
            signature[name] = "*" + NAMES[dtype]
        elif name == "out_ptr":
            signature[name] = "*" + (out or NAMES[dtype])
        elif name.startswith(("job_begin", "job_end")):
            signature[name] = "*i64"
        else:
            signature[name] = "*i32" if name.endswith("_ptr") else "i32"
        if signature[name].startswith("*") or name == "num_slots":
            attributes[(index,)] = [["tt.divisibility", 16]]
    if config.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    fixed = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = Source(function, signature, fixed, attributes)
    target = target_of(arch)
    options = {"num_warps": max(1, config.warps * 32 // target.warp_size), "num_stages": config.stages}
    return triton.compile(source, target=target, options=options)


def channels(work: ProblemSize, index64: bool = False) -> dict:
    """The constants that both kernels share."""
    return problem_constants(work, 16 // work.dtype.itemsize if work.aligned else 1, index64)


def works(arch: int | str, everything: bool) -> list[ProblemSize]:
    """What is compiled: dtypes, channels, groups and sizes; few of them unless everything is asked for."""
    capability = divmod(arch, 10) if isinstance(arch, int) else (0, 0)
    precision = "tf32" if capability >= PTX_FROM else "ieee"
    base = ProblemSize(torch.float16, 300_000, 27, 64, 64, 1, True, 132, capability, precision=precision)
    few = [base, replace(base, group_in=256, group_out=256), replace(base, group_in=5, group_out=7, aligned=False)]
    few.append(replace(base, dtype=torch.float32, precision="ieee"))
    few.append(replace(base, num_rows=4_000_000))
    eighths = [dtype for dtype in EIGHT_BITS if capability >= (8, 9) or dtype == torch.int8]
    few += [replace(base, dtype=dtype, group_in=c, group_out=c) for dtype in eighths for c in (64, 256)]
    if capability == (7, 5):  # without Triton's matrix units
        return [work for work in few if work.dtype == torch.float32]
    if not everything:
        return few
    many = []
    for dtype in (dtype for dtype in NAMES if dtype in eighths or dtype not in EIGHT_BITS):
        for c_in, c_out in ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (40, 72), (96, 192)):
            aligned = c_in * dtype.itemsize % 16 == c_out * dtype.itemsize % 16 == 0
            many.append(replace(base, dtype=dtype, group_in=c_in, group_out=c_out, aligned=aligned))
        many.append(replace(base, dtype=dtype, group_in=4, group_out=32, aligned=False))
        many.append(replace(base, dtype=dtype, group_in=1, group_out=1, groups=64))
        many.append(replace(base, dtype=dtype, group_in=32, group_out=32, groups=4))
        many.append(replace(base, dtype=dtype, num_rows=2000, group_in=256, group_out=256))
        many.append(replace(base, dtype=dtype, num_rows=15_000, group_in=1024, group_out=1024))
    many += [replace(work, precision="ieee") for work in many if work.dtype == torch.float32]
    return few + many


def first(candidates: Sequence, arch: int | str, everything: bool) -> Sequence:
    """Those that run where nothing is tuned: the first, and on a card that has its own kernels these."""
    if everything:
        return candidates
    return [config for place, config in enumerate(candidates) if place == 0 or (arch == 90 and config.gluon)]


def compile_all(arch: int | str, everything: bool) -> None:
    """Print the facts of every configuration."""
    for work in works(arch, everything):
        of_8_bits = work.dtype in EIGHT_BITS
        for transposed in (False,) if of_8_bits else (False, True):
            for config in first(conv_candidates(replace(work, transposed=transposed)), arch, everything):
                constants = dict(
                    channels(work, index64=transposed and everything),
                    BLOCK_M=config.block_m,
                    BLOCK_N=config.block_n,
                    BLOCK_K=config.block_k,
                    STAGES=config.stages,
                    TRANSPOSED=transposed != config.weight_copy,
                    HAS_BIAS=not transposed,
                    HAS_RESIDUAL=of_8_bits,
                    ACTIVATION=None,
                    TO_SLOTS=config.tap_groups > 1,
                    **({"TMA_WEIGHTS": config.tma_weights} if config.gluon else {}),
                    RESCALE=of_8_bits,
                )
                out = "fp32" if constants["TO_SLOTS"] else None
                report("conv_kernel", work, config, constants, arch, out, transposed=transposed)
        for weight in () if of_8_bits else first(weight_grad_candidates(work), arch, everything):
            constants = dict(
                channels(work),
                BLOCK_I=weight.block_i,
                BLOCK_O=weight.block_o,
                BLOCK_P=weight.block_p,
                STAGES=weight.stages,
            )
            report("weight_grad_kernel", work, weight, constants, arch, "fp32")


def report(name: str, work: ProblemSize, config, constants: dict, arch: int | str, out: str | None, **facts) -> None:
    """Compile one kernel and print what it became."""
    module = config.kernels
    function = getattr(importlib.import_module(f"sparseconv.backends.triton_implicit_gemm.{module}"), name)
    kernel = compile_kernel(function, work.dtype, constants, config, arch, out)
    ptx, amd = kernel.asm.get("ptx", ""), kernel.asm.get("amdgcn", "")
    sys.stdout.write(
        json.dumps(
            {
                "kernel": name,
                "dtype": str(work.dtype),
                "channels": (work.group_in, work.group_out, work.groups),
                "config": asdict(config),
                "gluon": config.gluon,
                "precision": constants["PRECISION"],
                "aligned": work.aligned,
                "shared": kernel.metadata.shared,
                "spill": spill_bytes(kernel),
                "wgmma": "wgmma.mma_async" in ptx,
                "tcgen05": "tcgen05.mma" in ptx,
                "mma": "mma.sync" in ptx or "v_mfma" in amd or "v_wmma" in amd,
                "copies": ptx.count("cp.async.cg"),
                **facts,
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    compile_all(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1], "all" in sys.argv[2:])
