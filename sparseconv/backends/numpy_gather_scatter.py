"""Gather, multiply, sum by output row: the CPU's strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.backends.base import Backend, Request
from sparseconv.backends.cpu_products import accumulate_gram, buffer, fresh, multiply
from sparseconv.backends.cpu_threads import share
from sparseconv.backends.edge_chunks import Chunk, EdgeChunks, EdgeRuns
from sparseconv.geometry.kernel_map import KernelMap

TILE = 64  # edges that share a weight; every product has a multiple of it as rows, so that oneDNN meets few shapes
BLOCK = 1 << 20  # bytes that one gathered block of a tap takes: an L2 cache
GRAM_ROWS = 4096  # rows that a product for a weight's gradient has at least, where there are as many
SPAN = 1 << 15  # output rows that stay in a cache while the weight's gradient goes over them tap by tap
SHARED = 1 << 29  # multiplications from which a call is worth sharing among threads: some ten milliseconds
BUFFER = 1 << 24  # bytes that the products of a chunk take: a share of an L3 cache


class NumpyGatherScatter(Backend):
    """For runs of output rows: gather, one product a tap into one buffer, and a sum by output row.

    The output rows are cut into chunks whose products fit a buffer. In a chunk each live tap gathers its input rows
    and multiplies them; then each output row, which has one owner, adds up its products in order of taps, with the
    identity tap as one plain product on top. Nothing is scattered, so nothing is raced for. Few channels make the
    products of a tap too small to be worth a call each: they go as one batched product of tiles of edges.
    """

    name = "numpy_gather_scatter"

    def unsupported(self, request: Request) -> str | None:
        if request.device.type != "cpu":
            return f"it runs on the CPU and the plan is on {request.device}"
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64"
        return None

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _convolve(x, weight, range(kernel_map.num_taps), kernel_map, groups, bias)

    @torch.no_grad()
    def input_grad(
        self, grad_out: torch.Tensor, weight: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> torch.Tensor:
        k, c_in, c_out = weight.shape
        if groups == 1:
            turned = weight.transpose(1, 2)
        else:
            split = weight.reshape(k, c_in, groups, c_out // groups)
            turned = split.permute(0, 3, 2, 1).reshape(k, c_out // groups, c_in * groups)
        if kernel_map.mirror is not None:  # the reversed edges of a tap are those of its mirror: the chunks serve twice
            return _convolve(grad_out, turned, kernel_map.mirror, kernel_map, groups, None)
        return _convolve(grad_out, turned, range(k), kernel_map.reverse(), groups, None)

    @torch.no_grad()
    def weight_grad(self, x: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int) -> torch.Tensor:
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
        c_in, c_out = x.shape[1], grad_out.shape[1]
        shape = (kernel_map.num_taps, c_in // groups, c_out)
        if 0 in shape or kernel_map.num_pairs == 0:
            return torch.zeros(shape, dtype=dtype)
        x, grad_out = x.to(wide).contiguous(), grad_out.to(wide).contiguous()
        threads = _threads(kernel_map.num_pairs * shape[1] * c_out)
        edges = EdgeRuns.of(kernel_map, SPAN, threads)
        partial = torch.zeros(threads, *shape, dtype=wide)
        step = _gram_rows(c_in, c_out, wide)
        identity = kernel_map.identity_tap
        begin = sum(kernel_map.tap_counts[:identity])

        def add_up(part: int) -> None:
            rows = min(step, max((b - a for _, a, b in edges.parts[part]), default=0))
            xs, gs = buffer("inputs", rows, c_in, wide), buffer("products", rows, c_out, wide)
            for tap, start, end in edges.parts[part]:
                for first in range(start, end, step):
                    last = min(first + step, end)
                    if tap == identity:
                        a, b = x[first - begin : last - begin], grad_out[first - begin : last - begin]
                    else:
                        a = torch.index_select(x, 0, edges.in_rows[first:last], out=xs[: last - first])
                        b = torch.index_select(grad_out, 0, edges.out_rows[first:last], out=gs[: last - first])
                    _accumulate(a, b, partial[part, tap], groups)

        share(add_up, range(threads), threads)
        return (partial[0] if threads == 1 else partial.sum(0)).to(dtype)

    def workspace_bytes(self, request: Request) -> int:
        wide = torch.promote_types(request.dtype, torch.float32)
        size, kernel_map, c_in, c_out = wide.itemsize, request.kernel_map, request.c_in, request.c_out
        tiled, threads = _tiled(c_in, c_out, request.groups), _threads(request.flops // 2)
        fitting = threads * _chunk_edges(c_in, c_out, wide, tiled)
        edges = min(fitting, kernel_map.num_pairs + kernel_map.num_out) + threads * kernel_map.num_taps * TILE
        sums = edges * c_out * size  # the products of the chunks at work and their sums
        tiles = edges * c_in * size + edges // TILE * c_in * c_out * size  # their inputs and weights
        blocks = tiles if tiled else 2 * threads * max(BLOCK, 512 * max(c_in, c_out) * size)
        rows = min(_gram_rows(c_in, c_out, wide), kernel_map.max_pairs_per_tap)
        own = kernel_map.num_taps * c_in * c_out // request.groups  # a weight's gradient
        grams = threads * (rows * (c_in + c_out) + own) * size
        widened = 0 if request.dtype == wide else max(kernel_map.num_in, kernel_map.num_out) * (c_in + c_out) * size
        return max(sums + blocks, grams) + widened


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    taps: Sequence[int],
    kernel_map: KernelMap,
    groups: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y[out] = sum over edges (k, in, out) of x[in] @ weight[taps[k]]."""
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    c_in, c_out = x.shape[1], weight.shape[2]
    y = fresh(kernel_map.num_out, c_out, dtype)
    if y.numel() == 0:
        return y
    if c_in == 0:
        return y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    x, weight = x.to(wide).contiguous(), weight.to(wide)
    if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()):
        weight = weight.contiguous()
    weight = weight[list(taps)] if list(taps) != list(range(len(taps))) else weight
    bias = None if bias is None else bias.to(wide)
    tiled = _tiled(c_in, c_out, groups)
    if tiled:
        weight = weight.contiguous()  # its tiles are picked by the thousand
    threads = _threads(kernel_map.num_pairs * c_in * c_out // groups)
    cut = EdgeChunks.of(kernel_map, _chunk_edges(c_in, c_out, wide, tiled), TILE, threads)
    step = max(512, BLOCK // (wide.itemsize * max(c_in, c_out)) // TILE * TILE)
    weights = weight.unbind()

    def convolve(chunk: Chunk) -> None:
        products = buffer("products", len(chunk.in_rows), c_out, wide)
        if tiled and chunk.taps:
            inputs = buffer("inputs", len(chunk.in_rows), c_in, wide)
            products = _multiply_tiles(x, weight, chunk, inputs, products, groups)
        else:
            inputs = buffer("inputs", min(step, len(chunk.in_rows)), c_in, wide)
            runs = [(tap, min(step, last - a)) for tap, first, last in chunk.taps for a in range(first, last, step)]
            sizes = [size for _, size in runs]  # one call each to cut them: the threads take turns in Python
            for (tap, size), picked, out in zip(runs, chunk.in_rows.split(sizes), products.split(sizes)):
                _multiply(torch.index_select(x, 0, picked, out=inputs[:size]), weights[tap], out, groups)
        sums = _sum_by_row(products, chunk)
        if bias is not None:
            sums += bias
        rows_out = y[chunk.start : chunk.stop]
        if kernel_map.identity_tap is None:
            rows_out.copy_(sums)
            return
        for a in range(0, chunk.stop - chunk.start, step):
            b = min(a + step, chunk.stop - chunk.start)
            summed = sums[a:b]
            target = rows_out[a:b] if dtype == wide else summed
            own = x[chunk.start + a : chunk.start + b]
            _multiply(own, weights[kernel_map.identity_tap], target, groups, summed)
        if dtype != wide:
            rows_out.copy_(sums)

    share(convolve, cut.chunks, threads)
    return y


def _tiled(c_in: int, c_out: int, groups: int) -> bool:
    """Whether the products of a chunk go as one batch of tiles."""
    return groups == c_in == c_out or (groups == 1 and min(c_in, c_out) < 24 and c_in * c_out <= 1024)


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
    size = BUFFER // 4 if tiled else BUFFER
    fitting = max(1, size // (wide.itemsize * max(c_in, c_out, 1)))
    return max(4096, 1 << (fitting.bit_length() - 1))


def _gram_rows(c_in: int, c_out: int, wide: torch.dtype) -> int:
    return max(GRAM_ROWS, 2 * BLOCK // (wide.itemsize * max(c_in, c_out, 1)))


def _sum_by_row(products: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """(rows of the chunk, C_out): the sum of each output row's products, zeros where it has none."""
    rows = chunk.stop - chunk.start
    if len(chunk.slots) == 0:
        return products.new_zeros(rows, products.shape[1])
    return torch.embedding_bag(products, chunk.slots, chunk.offsets, False, 0, False, None, True)[0]


def _multiply_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    chunk: Chunk,
    inputs: torch.Tensor,
    out: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    count = len(chunk.tile_taps)
    rows = torch.index_select(x, 0, chunk.in_rows, out=inputs[: len(chunk.in_rows)]).view(count, TILE, x.shape[1])
    weights = torch.index_select(weight, 0, chunk.tile_taps)
    if groups > 1:  # as many as channels
        return rows.mul_(weights).view(out.shape)
    torch.bmm(rows, weights, out=out.view(count, TILE, out.shape[1]))
    return out


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int, add: torch.Tensor | None = None
) -> None:
    """out (M, C_out) = x (M, C_in) times one tap's weight (C_in/G, C_out), plus ``add`` where given."""
    if groups == 1:
        multiply(x, weight, out, add)
    elif weight.shape[0] == 1 and groups == out.shape[1]:
        torch.mul(x, weight, out=out) if add is None else torch.addcmul(add, x, weight, out=out)
    else:
        product = torch.bmm(_by_group(x, groups), _by_group(weight, groups)).transpose(0, 1).reshape(out.shape)
        out.copy_(product) if add is None else torch.add(product, add, out=out)


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
