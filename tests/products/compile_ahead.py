"""Compiles every kernel of the products without a card: ``python -m tests.products.compile_ahead mul fp16 80 90``.

Calls the GPU path on CPU tensors with launches replaced by compilation, and prints a line for each kernel.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sparseconv.products.gpu import sums as gpu
from sparseconv.products.schedule import table_text
from sparseconv.products.table import PRODUCTS
from tests.backends.aot import target_of
from tests.products.cases import PRODUCT_NAMES, inputs, random_case

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launches(targets):
    """Makes each launch compile instead; returns the list that (kernel, target, registers known) goes to."""
    done = {}

    def run(self, *args, grid, warmup=False, **kwargs):
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages", "enable_fp_fusion") if key in kwargs}
        values = dict(zip(self.arg_names, args)) | kwargs
        constants = {
            name: value for name, value in values.items() if self.params[self.arg_names.index(name)].is_constexpr
        }
        constants |= {
            name: 1 for name, value in values.items() if name not in constants and type(value) is int and value == 1
        }
        signature, attrs = {}, {}
        for position, (name, value) in enumerate(values.items()):
            if name in constants:
                signature[name] = "constexpr"
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[name] = _TYPES[value.dtype] if tensor else "i64" if abs(value) >= 2**31 else "i32"
            if tensor or value % 16 == 0:
                attrs[(position,)] = [["tt.divisibility", 16]]
        key = (self.__name__, tuple(signature.items()), tuple((k, str(v)) for k, v in constants.items()))
        if key in done:
            return
        for target in targets:
            source = ASTSource(self, signature, {(self.arg_names.index(k),): v for k, v in constants.items()}, attrs)
            triton.compile(source, target=target_of(target), options=options)
        done[key] = options

    JITFunction.run = run
    return done


def main(words):
    targets = [int(word) for word in words if word.isdigit()] + [word for word in words if word.startswith("gfx")]
    targets = targets or [80, 90, 100]
    done = compile_launches(targets)
    case = random_case("random", 40, 6, 5, 4)
    gpu._UNROLLED = 1 << 12
    for name in [word for word in words if word in PRODUCT_NAMES] or PRODUCT_NAMES:
        row = PRODUCTS[name]
        for dtype in [dtype for dtype, text in DTYPES.items() if text in words] or DTYPES:
            info = case.infos(torch.float32)[0]
            terms = info.terms
            columns = (info.scale, info.index1, info.index2, info.seg_out, info.gather_index, info.index_out)
            terms = terms._replace(table=table_text(*columns))
            axes = {"a": 32, "b": 32, "c": 64}
            for batch, shared1, shared2, summed in (
                (2, False, False, False), (2, True, True, False), (64, False, False, False), (64, False, True, False),
                (64, True, False, False), (64, False, False, True), (20, False, False, False),
            ):  # fmt: skip
                x, y = inputs(name, case, shared1, shared2, batch=batch, axes=axes, dtype=dtype)
                x, y = (x[None] if shared1 else x), (y[None] if shared2 else y)
                gpu.segment_product(row, x, y, terms, summed, dtype)
            gpu.segment_scale(torch.empty(2, case.in1_size, 64, dtype=dtype), terms._replace(index2=None), dtype)
            gpu.segment_scale(torch.empty(20, case.in1_size, 64, dtype=dtype), terms._replace(index2=None), dtype)
    print(f"{len(done)} kernels compiled for {', '.join(map(str, targets))}")


if __name__ == "__main__":
    main(sys.argv[1:])
