"""Few terms, huge batch: a kernel written for the very structure, which reads every input and writes every row once."""

from __future__ import annotations

import linecache
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from sparseconv.products.terms import Terms
from sparseconv.products.triton_segments import row_strides, sum_dtype

#: vectors that a program may hold at once: more would not fit the registers
_RESIDENT = 72


@lru_cache(maxsize=256)
def _parsed(table: str) -> tuple[tuple[int, int, int, float], ...]:
    split = (term.split(",") for term in table.split(";"))
    return tuple((int(i), int(j), int(m), float(s)) for i, j, m, s in split)


def _vector_counts(x: torch.Tensor, y: torch.Tensor | None, out_vectors: int) -> dict[str, int]:
    """Rows of each operand that are vectors over the channels: what a program would have to hold."""
    return {
        "x": x.shape[1] if x.dim() == 3 else 0,
        "y": y.shape[1] if y is not None and y.dim() == 3 else 0,
        "out": out_vectors,
    }


def _streamed(counts: dict[str, int], inner: bool) -> str:
    """The operand that passes by row by row while the others are held; inner products hold all their sums."""
    return max((name for name in counts if not inner or name != "out"), key=lambda name: counts[name])


def can_unroll(kind: str, x: torch.Tensor, y: torch.Tensor | None, terms: Terms) -> bool:
    """Whether the structure is small enough to be written out: all operands but the largest fit the registers."""
    if not terms.table or terms.out_size > 512:
        return False
    counts = _vector_counts(x, y, terms.out_size)
    return sum(counts.values()) - counts[_streamed(counts, kind == "inner")] <= _RESIDENT


def unrolled_vectors(
    kind: str, x: torch.Tensor, y: torch.Tensor | None, terms: Terms, out: torch.Tensor, batch: int
) -> None:
    """Writes the elementwise (``"vector"``) or inner (``"inner"``) products to out (N, rows, C or none)."""
    inner = kind == "inner"
    channels = max(x.shape[2] if x.dim() == 3 else 1, y.shape[2] if y is not None and y.dim() == 3 else 1)
    if batch == 0 or channels == 0 or terms.out_size == 0:
        return
    counts = _vector_counts(x, y, terms.out_size)
    streamed = _streamed(counts, inner)
    resident = sum(counts.values()) - counts[streamed]
    block_n, block_c, warps = _tile(channels, resident, inner)
    kernel = _kernel(terms.table, terms.out_size, inner, x.dim() == 3, 0 if y is None else y.dim(), streamed)
    tiles_c = 1 if inner else triton.cdiv(channels, block_c)
    kernel[(triton.cdiv(batch, block_n) * tiles_c,)](
        x,
        x if y is None else y,
        out,
        batch,
        channels,
        tiles_c,
        *row_strides(x, 3),
        *row_strides(y, 3),
        *row_strides(out, 3),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        ACC=tl.float64 if sum_dtype(x, y) == torch.float64 else tl.float32,
        num_warps=warps,
    )


def _tile(channels: int, resident: int, inner: bool) -> tuple[int, int, int]:
    """Batch items and channels of a tile, and its warps: as many elements a thread as the registers hold."""
    block_c = min(triton.next_power_of_2(channels), 128)
    # two elements a thread measured best for sums over terms; inner products, which also sum over channels, like four
    elements = 4 if inner and resident <= 24 else 2 if resident <= 48 else 1
    warps = 2 if inner else 4
    return max(1, warps * 32 * elements // block_c), block_c, warps


@lru_cache(maxsize=256)
def _kernel(table: str, out_size: int, inner: bool, x_vector: bool, y_dim: int, streamed: str) -> Any:
    """The compiled-on-use kernel of one structure; Triton keeps its binary on disk, keyed by this text."""
    text = kernel_text(table, out_size, inner, x_vector, y_dim, streamed)
    name = f"<sparse product {abs(hash(text)):x}>"
    # Triton reads the text of a function where debuggers do
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(text, name, "exec"), space)
    return triton.jit(space["product_kernel"])


def kernel_text(table: str, out_size: int, inner: bool, x_vector: bool, y_dim: int, streamed: str) -> str:
    """The source of the kernel: terms ordered by the rows of the ``streamed`` operand, all others held in registers."""
    terms = _parsed(table)
    place = ("x", "y", "out").index(streamed)
    terms = tuple(sorted(terms, key=lambda term: term[place]))
    y_vector, has_y = y_dim == 3, y_dim > 0
    lines = [_HEAD]
    indent = "    "
    body: list[str] = []

    def load(operand: str, row: int, vector: bool) -> str:
        at = f"{operand}_n + {row} * stride_{operand}_m"
        if vector:
            pointer, mask = f"({at})[:, None] + c[None, :] * stride_{operand}_c", "mask"
            return f"{operand}{row} = tl.load({pointer}, mask={mask}, other=0.0).to(ACC)"
        return f"{operand}{row} = tl.load({at}, mask=in_n, other=0.0).to(ACC)[:, None]"

    def store(row: int, value: str) -> str:
        if inner:
            return f"tl.store(out_n + {row} * stride_out_m, {value}, mask=in_n)"
        return f"tl.store((out_n + {row} * stride_out_m)[:, None] + c[None, :] * stride_out_c, {value}, mask=mask)"

    def product(term: tuple[int, int, int, float]) -> str:
        i, j, _, factor = term
        # the scalar side takes the factor, once for all channels
        operands = [f"x{i}"] + ([f"y{j}"] if has_y else [])
        if has_y and x_vector and not y_vector:
            operands.reverse()
        if factor != 1.0:
            operands[0] = f"({operands[0]} * {factor!r})"
        return " * ".join(operands)

    scalars = [] if x_vector else [load("x", i, False) for i in sorted({t[0] for t in terms})]
    if has_y and not y_vector:
        scalars += [load("y", j, False) for j in sorted({t[1] for t in terms})]
    lines += [indent + line for line in scalars]
    rows_out = sorted({t[2] for t in terms})
    tile = "tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)"
    if inner or streamed != "out":
        lines += [f"{indent}out{m} = {tile}" for m in rows_out]
    if inner:
        lines.append(f"{indent}for tile_c in range(0, tl.cdiv(channels, BLOCK_C)):")
        indent += "    "
    body += ["c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)", "mask = in_n[:, None] & (c < channels)[None, :]"]
    vectors = {"x": x_vector, "y": y_vector}
    for operand, column in (("x", 0), ("y", 1)):
        if vectors[operand] and operand != streamed:
            body += [load(operand, row, True) for row in sorted({t[:2][column] for t in terms})]
    last: int | None = None
    for term in terms:
        row = term[:3][place]
        if streamed in ("x", "y"):
            if row != last:
                body.append(load(streamed, row, True))
            body.append(f"out{term[2]} += {product(term)}")
        elif inner:
            body.append(f"out{row} += {product(term)}")
        elif row != last:
            if last is not None:
                body.append(store(last, f"out{last}.to(out_ptr.dtype.element_ty)"))
            body.append(f"out{row} = {product(term)}")
        else:
            body.append(f"out{row} += {product(term)}")
        last = row
    if streamed == "out" and not inner and last is not None:
        body.append(store(last, f"out{last}.to(out_ptr.dtype.element_ty)"))
    lines += [indent + line for line in body]
    indent = "    "
    if inner:
        lines += [indent + store(m, f"tl.sum(out{m}, 1).to(out_ptr.dtype.element_ty)") for m in rows_out]
    elif streamed != "out":
        lines += [indent + store(m, f"out{m}.to(out_ptr.dtype.element_ty)") for m in rows_out]
    empty = sorted(set(range(out_size)) - set(rows_out))
    zero = (
        "tl.zeros([BLOCK_N], dtype=out_ptr.dtype.element_ty)"
        if inner
        else tile.replace("ACC", "out_ptr.dtype.element_ty")
    )
    lines += [indent + store(m, zero) for m in empty]
    return "\n".join(lines) + "\n"


_HEAD = """def product_kernel(
    x_ptr, y_ptr, out_ptr, batch, channels, tiles_c,
    stride_x_n, stride_x_m, stride_x_c, stride_y_n, stride_y_m, stride_y_c, stride_out_n, stride_out_m, stride_out_c,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,
):
    program = tl.program_id(0)
    tile_c = program % tiles_c
    n = (program // tiles_c).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < batch
    x_n = x_ptr + n * stride_x_n
    y_n = y_ptr + n * stride_y_n
    out_n = out_ptr + n * stride_out_n"""
