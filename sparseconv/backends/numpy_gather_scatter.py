"""Gather, multiply, sum by output row: the CPU's strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparseconv.backends import cpu_products
from sparseconv.backends.base import Backend, Request, turned
from sparseconv.backends.cpu_products import accumulate_gram, add_sums, buffer, multiply, not_on_cpu
from sparseconv.backends.cpu_threads import share
from sparseconv.backends.edge_chunks import Chunk, edge_chunks, reversed_edges
from sparseconv.backends.integers import Rescale
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.memory import empty

TILE = 128  # edges that share a weight; half of it where products go one by one, so that oneDNN meets few shapes
BLOCK = 1 << 20  # bytes that one gathered block of a tap takes: an L2 cache
SHARED = 1 << 29  # multiplications from which a call is worth sharing among threads: some ten milliseconds
TILED = 4096  # numbers of a tap's weight up to which its edges go as tiles; a quarter with one thread
BUFFER = 1 << 24  # bytes that the products of a chunk take: a share of an L3 cache


class NumpyGatherScatter(Backend):
    """For runs of output rows: gather, one product a tap into one buffer, and a sum by output row.

    The output rows are cut into chunks whose products fit a buffer. In a chunk each live tap gathers its input rows
    and multiplies them. Each output row then adds up its products in order of taps; the identity tap is one plain
    product on top. A row has one owner and nothing is scattered, so there are no races. With few channels a tap's
    product is too small for a call of its own: tiles of edges go as one batched product.
    """

    name = "numpy_gather_scatter"

    def unsupported(self, request: Request) -> str | None:
        return not_on_cpu(request)

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = empty((kernel_map.num_out, weight.shape[2]), x.dtype)
        _walk(x, kernel_map, groups, weight, bias, y)
        return y

    @torch.no_grad()
    def input_grad(
        self, grad_out: torch.Tensor, weight: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> torch.Tensor:
        grad_x = empty((kernel_map.num_in, weight.shape[1] * groups), grad_out.dtype)
        edges, taps = reversed_edges(kernel_map)
        _walk(grad_out, edges, groups, turned(weight, groups)[taps], None, grad_x)
        return grad_x

    @torch.no_grad()
    def weight_grad(self, x: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int) -> torch.Tensor:
        """The walk of `gradients` with one half left out: the same bits, whether dL/dx is wanted or not."""
        return _gradients(x, None, grad_out, kernel_map, groups, None)

    @torch.no_grad()
    def gradients(
        self, x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One walk: the rows of ``grad_out`` that an input row meets, once gathered, serve both."""
        grad_x = empty(x.shape, x.dtype)
        return grad_x, _gradients(x, weight, grad_out, kernel_map, groups, grad_x)

    @torch.no_grad()
    def integers(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
        rescale: Rescale | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In fp64, whose integers up to 2^53 are exact: sums of int8 products stay below 2^31."""
        start = None if bias is None else bias.double()
        sums = self.forward(x.double(), weight.double(), kernel_map, groups, start).int()
        return sums if rescale is None else rescale.apply(sums, residual)

    def workspace_bytes(self, request: Request) -> int:
        if request.dtype == torch.int8:
            kernel_map = request.kernel_map
            as_fp64 = replace(request, dtype=torch.float64)
            widened = kernel_map.num_in * request.c_in + 4 * kernel_map.num_out * request.c_out
            weight = kernel_map.num_taps * request.c_in * request.c_out // request.groups
            return self.workspace_bytes(as_fp64) + 8 * (widened + weight)
        wide = torch.promote_types(request.dtype, torch.float32)
        size, kernel_map, c_in, c_out = wide.itemsize, request.kernel_map, request.c_in, request.c_out
        tiled, threads = _tiled(c_in, c_out, request.groups), _threads(request.flops // 2)
        fitting = threads * _chunk_edges(c_in, c_out, wide, tiled)
        edges = min(fitting, kernel_map.num_pairs + kernel_map.num_out) + threads * kernel_map.num_taps * TILE
        gram = c_in * c_out // request.groups * size  # of a tap
        products = 2 * edges * max(c_in, c_out) * size  # of the chunks at work, and their sums
        tiles = edges * max(c_in, c_out) * size + edges // TILE * gram  # their inputs, and weights or grams
        blocks = tiles if tiled else 2 * threads * max(BLOCK, 512 * max(c_in, c_out) * size)
        widened = 0 if request.dtype == wide else max(kernel_map.num_in, kernel_map.num_out) * (c_in + c_out) * size
        return products + blocks + (threads + 2) * kernel_map.num_taps * gram + widened


def _gradients(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    grad_out: torch.Tensor,
    kernel_map: KernelMap,
    groups: int,
    grad_x: torch.Tensor | None,
) -> torch.Tensor:
    """The weight's gradient; with a weight, that of x in ``grad_x``, too."""
    edges, taps = reversed_edges(kernel_map)
    transposed = None if weight is None else turned(weight, groups)[taps]
    grams = _walk(grad_out, edges, groups, transposed, None, grad_x, near=x)
    grad_weight = torch.empty(kernel_map.num_taps, x.shape[1] // groups, grad_out.shape[1], dtype=x.dtype)
    grad_weight[taps] = turned(grams, groups)
    return grad_weight


def _walk(
    x: torch.Tensor,
    kernel_map: KernelMap,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    near: torch.Tensor | None = None,
) -> torch.Tensor:
    """One walk over all edges (k, in, out): a convolution, sums of outer products, or both.

    With a weight, x[in] @ weight[k] + bias is summed into y[out] (N_out, C_out). With ``near`` (N_out, C_out), the
    sums of x[in]^T near[out] are returned as (K, C_in/G, C_out); else an empty tensor.
    """
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    by = near if weight is None else weight
    assert by is not None
    c_in, c_out = x.shape[1], by.shape[-1]
    taps, identity = kernel_map.num_taps, kernel_map.identity_tap
    alive = kernel_map.num_out if identity is None else kernel_map.tap_counts[identity]  # rows that are dead follow
    threads = _threads(kernel_map.num_pairs * c_in * c_out // groups)
    grams = torch.zeros(threads, 0 if near is None else taps, c_in // groups, c_out, dtype=wide)
    if c_in == 0 and y is not None:
        y.copy_(torch.zeros(()) if bias is None else bias)
    if 0 in (kernel_map.num_out, c_in, c_out):
        return grams[0].to(dtype)
    x, near = x.to(wide).contiguous(), None if near is None else near.to(wide).contiguous()
    tiled = _tiled(c_in, c_out, groups)
    weights: Sequence[torch.Tensor] = ()
    if weight is not None:
        weight = weight.to(wide)
        if tiled or not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()):
            weight = weight.contiguous()
        weights = weight.unbind()
    bias = None if bias is None else bias.to(wide)
    tile = TILE if tiled else TILE // 2
    chunks = edge_chunks(kernel_map, _chunk_edges(c_in, c_out, wide, tiled), tile, threads)
    step = max(512, BLOCK // (wide.itemsize * max(c_in, c_out)) // TILE * TILE)

    def visit(chunk: Chunk, gram: torch.Tensor) -> None:
        products = buffer("products", len(chunk.in_rows), c_out, wide)
        if tiled:
            _tiles(x, weight, near, chunk, products, gram, groups)
        else:
            _runs(x, weights, near, chunk, products, gram, groups, step)
        rows = slice(chunk.start, chunk.stop)
        if near is not None and identity is not None:
            own = slice(chunk.start, min(chunk.stop, alive))
            _accumulate(x[own], near[own], gram[identity], groups)
        if y is None:
            return
        sums = y[rows] if dtype == wide else buffer("sums", chunk.stop - chunk.start, c_out, wide)
        if identity is not None:
            _multiply(x[rows], weights[identity], sums, groups)
        if bias is not None:
            sums.copy_(bias.expand_as(sums)) if identity is None else sums.add_(bias)
        add_sums(products, chunk.slots, chunk.offsets, sums, fill=identity is None and bias is None)
        if dtype != wide:
            y[rows] = sums

    if near is None:
        share(lambda chunk: visit(chunk, grams[0]), chunks, threads)
    else:  # which thread sums which chunks is fixed

        def part(number: int) -> None:
            for chunk in chunks[number::threads]:
                visit(chunk, grams[number])

        share(part, range(threads), threads)
    return (grams[0] if threads == 1 else grams.sum(0)).to(dtype)


def _runs(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    near: torch.Tensor | None,
    chunk: Chunk,
    products: torch.Tensor,
    gram: torch.Tensor,
    groups: int,
    step: int,
) -> None:
    """The products and grams of a chunk tap by tap, in blocks of ``step`` edges."""
    longest = min(step, len(chunk.in_rows))
    inputs = buffer("inputs", longest, x.shape[1], x.dtype)
    near_buffer = None if near is None else buffer("near", longest, near.shape[1], x.dtype)
    runs = [
        (tap, min(step, padded - a), min(step, last - a))
        for tap, first, last, padded in chunk.taps
        for a in range(first, padded, step)
    ]
    sizes = [size for _, size, _ in runs]  # one call each to cut them: the threads take turns in Python
    cut = (rows.split(sizes) for rows in (chunk.in_rows, chunk.out_rows, products))
    for (tap, size, edges), ins, outs, out in zip(runs, *cut):
        picked = torch.index_select(x, 0, ins, out=inputs[:size])
        if weights:
            _multiply(picked, weights[tap], out, groups)
        if near is not None and near_buffer is not None and edges > 0:
            met = torch.index_select(near, 0, outs[:edges], out=near_buffer[:edges])
            _accumulate(picked[:edges], met, gram[tap], groups)


def _tiles(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    near: torch.Tensor | None,
    chunk: Chunk,
    products: torch.Tensor,
    gram: torch.Tensor,
    groups: int,
) -> None:
    """The products and grams of a chunk as one batch each, of tiles that share a tap."""
    if not chunk.taps:
        return
    count, c_in, c_out = len(chunk.tile_taps), x.shape[1], products.shape[1]
    inputs = torch.index_select(x, 0, chunk.in_rows, out=buffer("inputs", len(chunk.in_rows), c_in, x.dtype))
    rows, out = inputs.view(count, -1, c_in), products.view(count, -1, c_out)
    own = buffer("tiles", count, c_in // groups * c_out, x.dtype)  # a matrix for each tile
    matrices = own.view(count, c_in // groups, c_out)
    if near is not None:
        met = torch.index_select(near, 0, chunk.out_rows, out=products)
        for padded in (inputs, met):  # both, since nothing times infinity is not nothing
            padded.index_fill_(0, chunk.padding, 0)
        if groups > 1:
            torch.sum(met.mul_(inputs).view(out.shape), 1, keepdim=True, out=matrices)
        else:
            torch.bmm(rows.transpose(1, 2), out, out=matrices)
        add_sums(own, torch.arange(count, dtype=torch.int32), chunk.tile_offsets, gram.view(len(gram), -1))
    if weight is not None:
        torch.index_select(weight, 0, chunk.tile_taps, out=matrices)
        if groups > 1:  # as many as channels
            torch.mul(rows, matrices, out=out)
        else:
            torch.bmm(rows, matrices, out=out)


def _tiled(c_in: int, c_out: int, groups: int) -> bool:
    """Whether the products of a chunk go as one batch of tiles."""
    if groups > 1:
        return groups == c_in == c_out
    limit = TILED if torch.get_num_threads() > 1 else TILED // 4
    return c_in * c_out <= limit and (min(c_in, c_out) < 24 or cpu_products.linear() is None)


def _threads(multiplications: int) -> int:
    """Threads that share the parts of a call; 1 leaves each operation to torch's own.

    torch's threads meet after every operation. Where another process holds a core, each of these hundreds of meetings
    waits for the scheduler: 100 times as long as the work. A small call is over before ours have met. Python keeps no
    more than some 16 busy.
    """
    return min(torch.get_num_threads(), 16) if multiplications > SHARED else 1


def _chunk_edges(c_in: int, c_out: int, wide: torch.dtype, tiled: bool) -> int:
    """Edges of a chunk: a power of 2, so that the layers of a network share few sets of chunks.

    A product for each tap of a chunk costs some 20 us to ask for, and pays with large chunks; tiles go as one batch.
    """
    size = BUFFER // 2 if tiled else BUFFER
    fitting = max(1, size // (wide.itemsize * max(c_in, c_out, 1)))
    return max(4096, 1 << (fitting.bit_length() - 1))


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int) -> None:
    """out (M, C_out) = x (M, C_in) times one tap's weight (C_in/G, C_out)."""
    if groups == 1:
        multiply(x, weight, out)
    elif weight.shape[0] == 1 and groups == out.shape[1]:
        torch.mul(x, weight, out=out)
    else:
        out.copy_(torch.bmm(_by_group(x, groups), _by_group(weight, groups)).transpose(0, 1).reshape(out.shape))


def _accumulate(x: torch.Tensor, g: torch.Tensor, out: torch.Tensor, groups: int) -> None:
    """out (C_in/G, C_out) += the gram of x (M, C_in) and g (M, C_out), group by group."""
    if groups == 1:
        accumulate_gram(x, g, out)
    elif out.shape[0] == 1 and groups == out.shape[1]:
        out += (x * g).sum(0)
    else:
        grams = torch.bmm(_by_group(x, groups).transpose(1, 2), _by_group(g, groups))
        out += grams.transpose(0, 1).reshape(out.shape)


def _by_group(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """(M, G c) seen as (G, M, c)."""
    return rows.reshape(len(rows), groups, -1).transpose(0, 1)
