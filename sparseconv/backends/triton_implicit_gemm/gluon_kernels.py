"""The implicit GEMM for Hopper in Gluon: row numbers fetched a step ahead, rows by cp.async, products by wgmma.

The pipeline is written out, which plain Triton cannot say: while the products of one step run, the rows of a later step
are being copied to shared memory, and the row numbers of the step after that are being read. Halves, single numbers in
tf32, and float8; channels in multiples of 8 (float8: of 16), so that every copy is 16 bytes, which is UNIT numbers.
Arguments are those of the plain kernels; the weight is packed, so its strides are constants here. Of single numbers
and of float8 wgmma takes weight tiles along the contracted channels only: TRANSPOSED.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparseconv.geometry.gpu import lists as schedule

#: the copy from global to shared memory, by the name it has in this Triton: (shared, pointers, mask)
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: the same of a whole tile by the copy engine: (descriptor, first element, barrier, shared, whether at all)
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
ROW_BITS = gl.constexpr(schedule.ROW_BITS)


@gluon.constexpr_function
def row_layout(columns, warps, unit, run=1):
    """Rows of ``columns`` numbers in pieces of ``unit``, neighbouring lanes along the row, ``run`` rows a lane."""
    lanes = min(columns // unit, 32)
    return gl.BlockedLayout([run, unit], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def gather_layout(rows, columns, warps, unit):
    """As ``row_layout``, with up to 4 rows a lane next to each other: their numbers are read at once."""
    return row_layout(columns, warps, unit, max(1, min(4, rows * min(columns // unit, 32) // (32 * warps))))


@gluon.constexpr_function
def shared_layout(columns, unit):
    """The swizzle under which wgmma reads a tile whose rows hold ``columns`` numbers, ``unit`` of them 16 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns * 16 // unit, 128), element_bitwidth=128 // unit, rank=2)


@gluon.jit
def copy_rows(ptr, shared, idx, stride, columns, limit, EVEN: gl.constexpr, WIDE: gl.constexpr):
    """Start copying rows ``idx`` at ``columns`` to shared memory; zeros for absent rows and columns past the end."""
    start = idx.to(gl.int64) * stride if WIDE else idx * stride
    mask = (idx >= 0)[:, None] & ((columns >= 0) if EVEN else (columns < limit))[None, :]
    copy_async(shared, ptr + (start[:, None] + columns[None, :]), mask=mask)


@gluon.jit
def copy_weight(
    ptr, shared, tap, kb, n0, valid, GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, TRANSPOSED: gl.constexpr, WIDE: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Start copying a tap's tile: (BLOCK_K, BLOCK_N) as it lies, or transposed (BLOCK_N, BLOCK_K)."""
    ROWS: gl.constexpr = GROUP_OUT if TRANSPOSED else GROUP_IN
    COLUMNS: gl.constexpr = GROUP_IN if TRANSPOSED else GROUP_OUT
    BLOCK_ROWS: gl.constexpr = BLOCK_N if TRANSPOSED else BLOCK_K
    BLOCK_COLUMNS: gl.constexpr = BLOCK_K if TRANSPOSED else BLOCK_N
    LAYOUT: gl.constexpr = row_layout(BLOCK_COLUMNS, gl.num_warps(), UNIT)
    STRIDE: gl.constexpr = GROUPS * COLUMNS
    row0 = n0 if TRANSPOSED else kb * BLOCK_K
    column0 = kb * BLOCK_K if TRANSPOSED else n0
    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    row_ok = (rows >= 0) if ROWS % BLOCK_ROWS == 0 else (rows < ROWS - row0)
    column_ok = (columns >= 0) if COLUMNS % BLOCK_COLUMNS == 0 else (columns < COLUMNS - column0)
    tap = tap.to(gl.int64) if WIDE else tap
    start = tap * (ROWS * STRIDE) + (row0 * STRIDE + column0)
    copy_async(
        shared,
        ptr + (start + ((rows * STRIDE)[:, None] + columns[None, :])),
        mask=(row_ok & valid)[:, None] & column_ok[None, :],
    )


@gluon.jit
def copy_step(
    feats_ptr, weight, a_shared, b_shared, landed, idx, tap, step, steps, n0, stride_feats_n, columns,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, GROUPS: gl.constexpr,
    TRANSPOSED: gl.constexpr, BULK: gl.constexpr, WIDE: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Start copying the rows and the weight tile of a step; of one beyond the last, nothing is read."""
    BLOCK_K: gl.constexpr = a_shared.shape[1]
    BLOCK_N: gl.constexpr = b_shared.shape[0] if TRANSPOSED else b_shared.shape[1]
    BLOCKS_K: gl.constexpr = (GROUP_IN + BLOCK_K - 1) // BLOCK_K
    kb = step % BLOCKS_K
    k0 = kb * BLOCK_K
    copy_rows(feats_ptr + k0, a_shared, idx, stride_feats_n, columns, GROUP_IN - k0, GROUP_IN % BLOCK_K == 0, WIDE)
    if BULK:
        row = tap * GROUP_OUT + n0 if TRANSPOSED else tap * GROUP_IN + k0
        column = k0 if TRANSPOSED else n0
        mbarrier.expect(landed, BLOCK_K * BLOCK_N * (16 // UNIT), pred=step < steps)
        copy_tile(weight, [row, column], landed, b_shared, pred=step < steps)
    else:
        copy_weight(
            weight, b_shared, tap, kb, n0, step < steps,
            GROUP_IN, GROUP_OUT, GROUPS, BLOCK_N, BLOCK_K, TRANSPOSED, WIDE, UNIT,
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def read_step(
    rows_ptr, taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, step, count, BLOCKS_K: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Row numbers and tap of ``step`` from the table row read before, and the table row of the step after it."""
    row &= ROW_BITS
    wide = row.to(gl.int64) if WIDE else row
    idx = gl.load(neighbors_ptr + wide * num_slots + slots)
    tap = gl.load(taps_ptr + list_start + gl.minimum(step // BLOCKS_K, count))
    row = gl.load(rows_ptr + list_start + gl.minimum((step + 1) // BLOCKS_K, count))
    return idx, tap, row


@gluon.jit
def places_of(
    out_rows_ptr, first, count, n0, group, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_OUT: gl.constexpr,
    GROUPS: gl.constexpr, LAYOUT: gl.constexpr, TO_SLOTS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Where the numbers of a tile lie in the result, of none in row 0, and which of them there are; in slots there are
    those of tiles with a live tap, the only ones that are read."""
    slots = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    rows = slots if TO_SLOTS else gl.load(out_rows_ptr + slots)
    there = (slots >= 0) & (count > 0) if TO_SLOTS else rows >= 0
    rows = rows.to(gl.int64) if WIDE else rows
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    mask = there[:, None] & ((n >= 0) if GROUP_OUT % BLOCK_N == 0 else (n < GROUP_OUT))[None, :]
    return (gl.maximum(rows, 0) * (GROUPS * GROUP_OUT))[:, None] + (group * GROUP_OUT + n)[None, :], mask


@gluon.jit
def rescaled(acc, residual, numbers_ptr, columns, mask, ALL_OUT: gl.constexpr, HAS_RESIDUAL: gl.constexpr):
    """`kernels.rescaled` of fp32 sums."""
    acc *= gl.load(numbers_ptr + ALL_OUT + columns, mask=mask, other=0.0)[None, :]
    if HAS_RESIDUAL:
        acc += residual * gl.load(numbers_ptr + 2 * ALL_OUT)
    acc = gl.where(acc < 0, acc * gl.load(numbers_ptr + 2 * ALL_OUT + 1), acc)
    return gl.minimum(gl.maximum(acc, -448.0), 448.0)


@gluon.jit
def write_tile(
    acc, out_ptr, bias_ptr, residual_ptr, out_rows_ptr, first, count, n0, group, GROUPS: gl.constexpr,
    GROUP_OUT: gl.constexpr, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr, TO_SLOTS: gl.constexpr, WIDE: gl.constexpr, RESCALE: gl.constexpr,
):  # fmt: skip
    """out[rows] = act(acc + bias + residual), in pieces of 16 bytes; with RESCALE float8 of them, see `rescaled`."""
    MMA: gl.constexpr = acc.type.layout
    BLOCK_M: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    ALL_OUT: gl.constexpr = GROUPS * GROUP_OUT
    acc_n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
    if HAS_BIAS:
        bias = gl.load(bias_ptr + group * GROUP_OUT + acc_n, mask=acc_n < GROUP_OUT, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    if HAS_RESIDUAL:
        places, mask = places_of(
            out_rows_ptr, first, count, n0, group, BLOCK_M, BLOCK_N, GROUP_OUT, GROUPS, LAYOUT, TO_SLOTS, WIDE
        )  # fmt: skip
        residual = gl.convert_layout(gl.load(residual_ptr + places, mask=mask, other=0.0), MMA).to(gl.float32)
        if RESCALE:
            acc = rescaled(acc, residual, bias_ptr, group * GROUP_OUT + acc_n, acc_n < GROUP_OUT, ALL_OUT, True)
        else:
            acc += residual
    elif RESCALE:
        acc = rescaled(acc, acc, bias_ptr, group * GROUP_OUT + acc_n, acc_n < GROUP_OUT, ALL_OUT, False)
    if ACTIVATION is not None:
        acc = ACTIVATION(acc)
    places, mask = places_of(
        out_rows_ptr, first, count, n0, group, BLOCK_M, BLOCK_N, GROUP_OUT, GROUPS, LAYOUT, TO_SLOTS, WIDE
    )  # fmt: skip
    gl.store(out_ptr + places, gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT), mask=mask)


@gluon.jit
def conv_kernel(
    feats_ptr, weight, out_ptr, bias_ptr, residual_ptr,
    neighbors_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
    num_slots, list_stride, stride_feats_n, stride_weight_k, stride_weight_c, UNIT: gl.constexpr,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, PACK: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr,
    TO_SLOTS: gl.constexpr, WIDE: gl.constexpr, HIDDEN: gl.constexpr, PRECISION: gl.constexpr, BULK: gl.constexpr,
    RESCALE: gl.constexpr,
):  # fmt: skip
    """y[out_rows[slot]] = act(sum over live taps of x[neighbors[tap, slot]] @ w[tap] + bias + residual), one tile.

    BULK: ``weight`` is the descriptor of a matrix whose rows are those of all taps, cut into whole tiles; the copy
    engine brings one at a time. Else it is a pointer. See `kernels`.
    """
    stride_feats_n *= UNIT  # a factor that the compiler sees: it proves that pieces of 16 bytes are aligned
    BLOCKS_K: gl.constexpr = (GROUP_IN + BLOCK_K - 1) // BLOCK_K
    BLOCKS_N: gl.constexpr = (GROUP_OUT + BLOCK_N - 1) // BLOCK_N
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = feats_ptr.dtype.element_ty
    A_LAYOUT: gl.constexpr = gather_layout(BLOCK_M, BLOCK_K, WARPS, UNIT)
    N_LAYOUT: gl.constexpr = row_layout(BLOCK_N, WARPS, UNIT)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 2 * UNIT]
    )
    pid = gl.program_id(0)
    tile = gl.load(tile_order_ptr + pid // (GROUPS * BLOCKS_N))
    group = (pid // BLOCKS_N) % GROUPS
    n0 = (pid % BLOCKS_N) * BLOCK_N
    slots = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, A_LAYOUT))
    list_start = tile * list_stride
    count = gl.load(tile_counts_ptr + tile)
    steps = count * BLOCKS_K
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, A_LAYOUT))
    feats_ptr += group * GROUP_IN
    if not BULK:
        weight += group * (GROUP_IN if TRANSPOSED else GROUP_OUT)
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], shared_layout(BLOCK_K, UNIT))
    if TRANSPOSED:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], shared_layout(BLOCK_K, UNIT))
    else:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, BLOCK_N], shared_layout(BLOCK_N, UNIT))
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if BULK:
        for s in gl.static_range(STAGES):
            mbarrier.init(landed.index(s), count=1)
        fence_async_shared()
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    row = gl.load(tile_rows_ptr + list_start)
    idx, tap, row = read_step(
        tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, 0, count, BLOCKS_K, WIDE
    )
    for s in gl.static_range(STAGES - 1):
        copy_step(
            feats_ptr, weight, a_shared.index(s), b_shared.index(s), landed.index(s), idx, tap, s, steps, n0,
            stride_feats_n, columns, GROUP_IN, GROUP_OUT, GROUPS, TRANSPOSED, BULK, WIDE, UNIT,
        )  # fmt: skip
        idx, tap, row = read_step(
            tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, s + 1, count, BLOCKS_K, WIDE
        )
    use = 0
    fill = STAGES - 1
    turn = 0
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        if BULK:
            mbarrier.wait(landed.index(use), turn)
            turn = gl.where(use == STAGES - 1, turn ^ 1, turn)
        fence_async_shared()
        b = b_shared.index(use).permute((1, 0)) if TRANSPOSED else b_shared.index(use)
        acc = warpgroup_mma(a_shared.index(use), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])  # the step before is done: its buffers are free
        ahead = step + STAGES - 1
        copy_step(
            feats_ptr, weight, a_shared.index(fill), b_shared.index(fill), landed.index(fill), idx, tap, ahead, steps,
            n0, stride_feats_n, columns, GROUP_IN, GROUP_OUT, GROUPS, TRANSPOSED, BULK, WIDE, UNIT,
        )  # fmt: skip
        idx, tap, row = read_step(
            tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, ahead + 1, count, BLOCKS_K,
            WIDE,
        )  # fmt: skip
        use = gl.where(use == STAGES - 1, 0, use + 1)
        fill = gl.where(fill == STAGES - 1, 0, fill + 1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    async_copy.wait_group(0)
    if BULK:
        for s in gl.static_range(STAGES):
            mbarrier.invalidate(landed.index(s))
    write_tile(
        acc, out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile * BLOCK_M, count, n0, group, GROUPS, GROUP_OUT,
        N_LAYOUT, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, TO_SLOTS, WIDE, RESCALE,
    )  # fmt: skip
