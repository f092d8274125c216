"""Few terms, large batch: a kernel generated for the structure, which reads every input and writes every row once.

The generator knows nothing of the seven products. Its input is the table of terms, and lines of the form
``target += factor * first * second`` for each term. A product is one such line, both of its gradients are two.
"""

from __future__ import annotations

import linecache
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparseconv.products.gpu.segments import row_strides, sum_dtype

#: vectors that a program may hold at once: more would not fit the registers
_RESIDENT = 72


class Operand(NamedTuple):
    """What a kernel reads or writes: its name, which of a term's three rows it has, and whether rows are vectors."""

    name: str
    slot: int
    vector: bool


class Line(NamedTuple):
    """``target += factor * first * second``, summed over channels where only the target is a scalar."""

    target: str
    first: str
    second: str | None


class Structure(NamedTuple):
    """A kernel's whole meaning: the table of its terms, what it reads, what it writes, and the lines for each term."""

    table: str
    inputs: tuple[Operand, ...]
    targets: tuple[Operand, ...]
    lines: tuple[Line, ...]
    rows: tuple[int, int, int]  # of each slot

    def resident(self, streamed: int) -> int:
        """Vectors that are held at once while the rows of one slot pass by."""
        held = sum(self.rows[o.slot] for o in self.inputs if o.vector and o.slot != streamed)
        return held + sum(self.rows[t.slot] for t in self.targets if not (t.vector and t.slot == streamed))

    @property
    def streamed(self) -> int:
        """The slot whose rows pass by one after the other: the one that leaves least to hold."""
        return min(range(3), key=self.resident)

    @property
    def reduced(self) -> bool:
        """Whether a target is summed over the channels."""
        return any(not target.vector for target in self.targets)


def can_unroll(structure: Structure) -> bool:
    """Whether the structure is small enough to be written out: what is not streamed fits the registers."""
    return bool(structure.table) and structure.resident(structure.streamed) <= _RESIDENT


def run_unrolled(structure: Structure, tensors: list[torch.Tensor], batch: int) -> None:
    """Runs the kernel on the inputs and then the targets, each (N or 1, rows, C) or, a scalar a row, (N or 1, rows)."""
    channels = max(tensor.shape[2] for tensor in tensors if tensor.dim() == 3)
    if batch == 0 or channels == 0:
        return
    block_n, block_c, warps = _tile(channels, structure.resident(structure.streamed), structure.reduced)
    tiles_c = 1 if structure.reduced else triton.cdiv(channels, block_c)
    double = any(sum_dtype(tensor, None) == torch.float64 for tensor in tensors)
    _kernel(structure)[(triton.cdiv(batch, block_n) * tiles_c,)](
        *tensors,
        *(stride for tensor in tensors for stride in row_strides(tensor, 3)),
        batch,
        channels,
        tiles_c,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        ACC=tl.float64 if double else tl.float32,
        num_warps=warps,
        enable_fp_fusion=True,
    )


def _tile(channels: int, resident: int, reduced: bool) -> tuple[int, int, int]:
    """Batch items and channels of a tile, and its warps: as many elements per thread as the registers hold."""
    block_c = min(triton.next_power_of_2(channels), 128)
    # measured on an H200: two elements per thread; sums over channels within one warp, where they need no barrier
    elements = 2 if resident <= 48 else 1
    warps = 1 if reduced else 2
    return max(1, warps * 32 * elements // block_c), block_c, warps


@lru_cache(maxsize=256)
def _kernel(structure: Structure) -> Any:
    """The compiled-on-use kernel of one structure; Triton keeps its binary on disk, keyed by this text."""
    text = kernel_text(structure)
    name = f"<sparse product {abs(hash(text)):x}>"
    # Triton reads the text of a function where debuggers do
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(text, name, "exec"), space)
    return triton.jit(space["product_kernel"])


def _parsed(table: str) -> list[tuple[tuple[int, int, int], float]]:
    split = (term.split(",") for term in table.split(";"))
    return [((int(i), int(j), int(m)), float(s)) for i, j, m, s in split]


def kernel_text(structure: Structure) -> str:
    """The source: terms ordered by the rows of the streamed slot, everything else held in registers."""
    streamed, reduced = structure.streamed, structure.reduced
    terms = sorted(_parsed(structure.table), key=lambda term: term[0][streamed])
    used = [sorted({rows[slot] for rows, _ in terms}) for slot in range(3)]
    passing = [o for o in structure.inputs if o.vector and o.slot == streamed]
    leaving = [t for t in structure.targets if t.vector and t.slot == streamed]
    held = [t for t in structure.targets if t.vector and t.slot != streamed]
    summed = [t for t in structure.targets if not t.vector]
    tile = "tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)"

    before = [_load(o, row) for o in structure.inputs if not o.vector for row in used[o.slot]]
    before += [f"{t.name}{row} = {tile}" for t in summed for row in used[t.slot]]
    body = ["c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)", "mask = in_n[:, None] & (c < channels)[None, :]"]
    body += [_load(o, row) for o in structure.inputs if o.vector and o.slot != streamed for row in used[o.slot]]
    body += [f"{t.name}{row} = {tile}" for t in held for row in used[t.slot]]
    for position, (rows, factor) in enumerate(terms):
        row = rows[streamed]
        if position == 0 or terms[position - 1][0][streamed] != row:
            body += [_load(o, row) for o in passing]
            body += [f"{t.name}{row} = {tile}" for t in leaving]
        body += [_added(structure, line, rows, factor) for line in structure.lines]
        if position + 1 == len(terms) or terms[position + 1][0][streamed] != row:
            body += [_store(t, row, f"{t.name}{row}") for t in leaving]
    body += [_store(t, row, f"{t.name}{row}") for t in held for row in used[t.slot]]
    body += [
        _store(t, row, tile) for t in leaving + held for row in range(structure.rows[t.slot]) if row not in used[t.slot]
    ]
    after = [_store(t, row, f"tl.sum({t.name}{row}, 1)") for t in summed for row in used[t.slot]]
    empty = "tl.zeros([BLOCK_N], dtype=ACC)"
    after += [_store(t, row, empty) for t in summed for row in range(structure.rows[t.slot]) if row not in used[t.slot]]

    names = [operand.name for operand in (*structure.inputs, *structure.targets)]
    lines = [f"def product_kernel({', '.join(f'{name}_ptr' for name in names)},"]
    lines += [f"    stride_{name}_n, stride_{name}_m, stride_{name}_c," for name in names]
    lines += ["    batch, channels, tiles_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, ACC: tl.constexpr,", "):"]
    start = ["program = tl.program_id(0)", "tile_c = program % tiles_c"]
    start += ["n = (program // tiles_c).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)", "in_n = n < batch"]
    start += [f"{name}_n = {name}_ptr + n * stride_{name}_n" for name in names]
    if reduced:
        start += before + ["for tile_c in range(0, tl.cdiv(channels, BLOCK_C)):"]
        body = ["    " + line for line in body]
    else:
        start += before
    return "\n".join(lines + ["    " + line for line in start + body + after]) + "\n"


def _load(operand: Operand, row: int) -> str:
    name = operand.name
    at = f"{name}_n + {row} * stride_{name}_m"
    if operand.vector:
        pointer = f"({at})[:, None] + c[None, :] * stride_{name}_c"
        return f"{name}{row} = tl.load({pointer}, mask=mask, other=0.0).to(ACC)"
    return f"{name}{row} = tl.load({at}, mask=in_n, other=0.0).to(ACC)[:, None]"


def _store(operand: Operand, row: int, value: str) -> str:
    name = operand.name
    at, value = f"{name}_n + {row} * stride_{name}_m", f"({value}).to({name}_ptr.dtype.element_ty)"
    if operand.vector:
        return f"tl.store(({at})[:, None] + c[None, :] * stride_{name}_c, {value}, mask=mask)"
    return f"tl.store({at}, {value}, mask=in_n)"


def _added(structure: Structure, line: Line, rows: tuple[int, int, int], factor: float) -> str:
    by_name = {operand.name: operand for operand in (*structure.inputs, *structure.targets)}
    operands = [by_name[name] for name in (line.first, line.second) if name is not None]
    # a scalar takes the factor, once for all channels
    operands.sort(key=lambda operand: operand.vector)
    names = [f"{operand.name}{rows[operand.slot]}" for operand in operands]
    if factor != 1.0:
        names[0] = f"({names[0]} * {factor!r})"
    return f"{line.target}{rows[by_name[line.target].slot]} += {' * '.join(names)}"
