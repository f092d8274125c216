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
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
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
    """Rows of ``columns`` numbers in pieces of ``unit``, neighboring lanes along the row, ``run`` rows per lane."""
    lanes = min(columns // unit, 32)
    return gl.BlockedLayout([run, unit], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def gather_layout(rows, columns, warps, unit):
    """As ``row_layout``, with up to 4 rows per lane next to each other: their numbers are read at once."""
    return row_layout(columns, warps, unit, max(1, min(4, rows * min(columns // unit, 32) // (32 * warps))))


@gluon.constexpr_function
def shared_layout(columns, unit):
    """The swizzle under which wgmma reads a tile whose rows hold ``columns`` numbers, ``unit`` of them 16 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns * 16 // unit, 128), element_bitwidth=128 // unit, rank=2)


@gluon.jit
def copy_rows(ptr, shared, idx, stride, columns, limit, EVEN: gl.constexpr, INDEX64: gl.constexpr):
    """Start copying rows ``idx`` at ``columns`` to shared memory; zeros for absent rows and columns past the end."""
    start = idx.to(gl.int64) * stride if INDEX64 else idx * stride
    mask = (idx >= 0)[:, None] & ((columns >= 0) if EVEN else (columns < limit))[None, :]
    copy_async(shared, ptr + (start[:, None] + columns[None, :]), mask=mask)


@gluon.jit
def copy_weight(
    ptr, shared, tap, kb, n0, valid, GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, TRANSPOSED: gl.constexpr, INDEX64: gl.constexpr, UNIT: gl.constexpr,
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
    tap = tap.to(gl.int64) if INDEX64 else tap
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
    TRANSPOSED: gl.constexpr, TMA_WEIGHTS: gl.constexpr, INDEX64: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Start copying the rows and the weight tile of a step; of one beyond the last, nothing is read."""
    BLOCK_K: gl.constexpr = a_shared.shape[1]
    BLOCK_N: gl.constexpr = b_shared.shape[0] if TRANSPOSED else b_shared.shape[1]
    BLOCKS_K: gl.constexpr = (GROUP_IN + BLOCK_K - 1) // BLOCK_K
    kb = step % BLOCKS_K
    k0 = kb * BLOCK_K
    copy_rows(feats_ptr + k0, a_shared, idx, stride_feats_n, columns, GROUP_IN - k0, GROUP_IN % BLOCK_K == 0, INDEX64)
    if TMA_WEIGHTS:
        row = tap * GROUP_OUT + n0 if TRANSPOSED else tap * GROUP_IN + k0
        column = k0 if TRANSPOSED else n0
        mbarrier.expect(landed, BLOCK_K * BLOCK_N * (16 // UNIT), pred=step < steps)
        copy_tile(weight, [row, column], landed, b_shared, pred=step < steps)
    else:
        copy_weight(
            weight, b_shared, tap, kb, n0, step < steps,
            GROUP_IN, GROUP_OUT, GROUPS, BLOCK_N, BLOCK_K, TRANSPOSED, INDEX64, UNIT,
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def read_step(
    rows_ptr, taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, step, count, BLOCKS_K: gl.constexpr,
    INDEX64: gl.constexpr,
):  # fmt: skip
    """Row numbers and tap of ``step`` from the table row read before, and the table row of the step after it."""
    row &= ROW_BITS
    row64 = row.to(gl.int64) if INDEX64 else row
    idx = gl.load(neighbors_ptr + row64 * num_slots + slots)
    tap = gl.load(taps_ptr + list_start + gl.minimum(step // BLOCKS_K, count))
    row = gl.load(rows_ptr + list_start + gl.minimum((step + 1) // BLOCKS_K, count))
    return idx, tap, row


@gluon.jit
def places_of(
    out_rows_ptr, first, count, n0, group, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_OUT: gl.constexpr,
    GROUPS: gl.constexpr, LAYOUT: gl.constexpr, TO_SLOTS: gl.constexpr, INDEX64: gl.constexpr,
):  # fmt: skip
    """Where the numbers of a tile lie in the result, of none in row 0, and which of them there are; in slots there are
    those of tiles with a live tap, the only ones that are read."""
    slots = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    rows = slots if TO_SLOTS else gl.load(out_rows_ptr + slots)
    there = (slots >= 0) & (count > 0) if TO_SLOTS else rows >= 0
    rows = rows.to(gl.int64) if INDEX64 else rows
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
    ACTIVATION: gl.constexpr, TO_SLOTS: gl.constexpr, INDEX64: gl.constexpr, RESCALE: gl.constexpr,
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
            out_rows_ptr, first, count, n0, group, BLOCK_M, BLOCK_N, GROUP_OUT, GROUPS, LAYOUT, TO_SLOTS, INDEX64
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
        out_rows_ptr, first, count, n0, group, BLOCK_M, BLOCK_N, GROUP_OUT, GROUPS, LAYOUT, TO_SLOTS, INDEX64
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
    TO_SLOTS: gl.constexpr, INDEX64: gl.constexpr, ASM_LOADS: gl.constexpr, PRECISION: gl.constexpr,
    TMA_WEIGHTS: gl.constexpr, RESCALE: gl.constexpr,
):  # fmt: skip
    """y[out_rows[slot]] = act(sum over live taps of x[neighbors[tap, slot]] @ w[tap] + bias + residual), one tile.

    TMA_WEIGHTS: ``weight`` is the descriptor of a matrix whose rows are those of all taps, cut into whole tiles; the
    copy engine brings one at a time. Else it is a pointer. See `kernels`.
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
    if not TMA_WEIGHTS:
        weight += group * (GROUP_IN if TRANSPOSED else GROUP_OUT)
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], shared_layout(BLOCK_K, UNIT))
    if TRANSPOSED:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], shared_layout(BLOCK_K, UNIT))
    else:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, BLOCK_N], shared_layout(BLOCK_N, UNIT))
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if TMA_WEIGHTS:
        for s in gl.static_range(STAGES):
            mbarrier.init(landed.index(s), count=1)
        fence_async_shared()
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    row = gl.load(tile_rows_ptr + list_start)
    idx, tap, row = read_step(
        tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, 0, count, BLOCKS_K, INDEX64
    )
    for s in gl.static_range(STAGES - 1):
        copy_step(
            feats_ptr, weight, a_shared.index(s), b_shared.index(s), landed.index(s), idx, tap, s, steps, n0,
            stride_feats_n, columns, GROUP_IN, GROUP_OUT, GROUPS, TRANSPOSED, TMA_WEIGHTS, INDEX64, UNIT,
        )  # fmt: skip
        idx, tap, row = read_step(
            tile_rows_ptr,
            tile_taps_ptr,
            neighbors_ptr,
            num_slots,
            slots,
            list_start,
            row,
            s + 1,
            count,
            BLOCKS_K,
            INDEX64,
        )
    use = 0
    fill = STAGES - 1
    turn = 0
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        if TMA_WEIGHTS:
            mbarrier.wait(landed.index(use), turn)
            turn = gl.where(use == STAGES - 1, turn ^ 1, turn)
        fence_async_shared()
        b = b_shared.index(use).permute((1, 0)) if TRANSPOSED else b_shared.index(use)
        acc = warpgroup_mma(a_shared.index(use), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])  # the step before is done: its buffers are free
        ahead = step + STAGES - 1
        copy_step(
            feats_ptr, weight, a_shared.index(fill), b_shared.index(fill), landed.index(fill), idx, tap, ahead, steps,
            n0, stride_feats_n, columns, GROUP_IN, GROUP_OUT, GROUPS, TRANSPOSED, TMA_WEIGHTS, INDEX64, UNIT,
        )  # fmt: skip
        idx, tap, row = read_step(
            tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, list_start, row, ahead + 1, count, BLOCKS_K,
            INDEX64,
        )  # fmt: skip
        use = gl.where(use == STAGES - 1, 0, use + 1)
        fill = gl.where(fill == STAGES - 1, 0, fill + 1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    async_copy.wait_group(0)
    if TMA_WEIGHTS:
        for s in gl.static_range(STAGES):
            mbarrier.invalidate(landed.index(s))
    write_tile(
        acc, out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile * BLOCK_M, count, n0, group, GROUPS, GROUP_OUT,
        N_LAYOUT, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, TO_SLOTS, INDEX64, RESCALE,
    )  # fmt: skip


# ---- weight gradients: pairs read a step ahead, rows by cp.async, products by wgmma or mma


@gluon.constexpr_function
def takes_wgmma(rows, unit):
    """Whether wgmma sums a weight gradient: it takes halves, of 64 rows of the sums or more; mma takes all else."""
    return unit == 8 and rows >= 64


@gluon.constexpr_function
def pairs_layout(columns, unit, wgmma):
    """How the rows of pairs lie in shared memory: as wgmma reads them; for mma, so that 8 halves in each of 8 rows, or
    8 neighbors of single numbers in each of 4, which it takes at once, lie in different banks."""
    if wgmma:
        return shared_layout(columns, unit)
    if unit == 8:
        rows = max(1, 64 // columns)  # in a line of all banks
        return gl.SwizzledSharedLayout(8, rows, 8 // rows, [1, 0])
    return gl.SwizzledSharedLayout(8, 1, 4, [1, 0])


@gluon.constexpr_function
def grad_layout(rows, columns, warps, unit):
    """Who holds what of a weight gradient's sums."""
    if takes_wgmma(rows, unit):
        down = warps if rows >= 16 * warps else rows // 16
        return gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[down, warps // down], instr_shape=[16, columns // (warps // down), 16]
        )
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps // 2, 2], instr_shape=[16, 8])


@gluon.jit
def read_pairs(in_rows_ptr, out_rows_ptr, at_in, at_out, last):
    """Input and output rows at these positions of a job's list, -1 beyond its last one."""
    in_rows = gl.load(in_rows_ptr + at_in, mask=at_in <= last, other=-1)
    out_rows = gl.load(out_rows_ptr + at_out, mask=at_out <= last, other=-1)
    return in_rows, out_rows


@gluon.jit
def add_pairs(a, b, acc, UNIT: gl.constexpr, WGMMA: gl.constexpr):
    """acc + a^T b over the pairs of a step. wgmma takes halves as they lie, and runs on; single numbers it would want
    transposed, both sides, so mma takes those from registers, and few channels of halves, of which it wastes none."""
    if WGMMA:
        fence_async_shared()
        acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
        return warpgroup_mma_wait(num_outstanding=1, deps=[acc])
    else:
        MMA: gl.constexpr = acc.type.layout
        for k in gl.static_range(a.shape[0] // 16):
            x = a.slice(16 * k, 16).permute((1, 0)).load(gl.DotOperandLayout(0, MMA, UNIT // 4))
            y = b.slice(16 * k, 16).load(gl.DotOperandLayout(1, MMA, UNIT // 4))
            acc = mma_v2(x, y, acc, input_precision="tf32")
        return acc


@gluon.jit
def weight_grad_kernel(
    feats_ptr, grad_ptr, out_ptr, in_rows_ptr, out_rows_ptr, job_begin_ptr, job_end_ptr, job_order_ptr,
    stride_feats_n, stride_grad_n, UNIT: gl.constexpr,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, PACK: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_I: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_P: gl.constexpr, STAGES: gl.constexpr,
    INDEX64: gl.constexpr, ASM_LOADS: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """out[job] = sum over the job's pairs of x[in]^T g[out]; a job is a run of one tap's pairs, see `Jobs`."""
    stride_feats_n *= UNIT
    stride_grad_n *= UNIT
    ALL_OUT: gl.constexpr = GROUPS * GROUP_OUT
    BLOCKS_I: gl.constexpr = (GROUP_IN + BLOCK_I - 1) // BLOCK_I
    BLOCKS_O: gl.constexpr = (GROUP_OUT + BLOCK_O - 1) // BLOCK_O
    EVEN_I: gl.constexpr = GROUP_IN % BLOCK_I == 0
    EVEN_O: gl.constexpr = GROUP_OUT % BLOCK_O == 0
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = feats_ptr.dtype.element_ty
    A_LAYOUT: gl.constexpr = row_layout(BLOCK_I, WARPS, UNIT)
    B_LAYOUT: gl.constexpr = row_layout(BLOCK_O, WARPS, UNIT)
    MMA: gl.constexpr = grad_layout(BLOCK_I, BLOCK_O, WARPS, UNIT)
    WGMMA: gl.constexpr = takes_wgmma(BLOCK_I, UNIT)
    pid = gl.program_id(0)
    job = gl.load(job_order_ptr + pid // (GROUPS * BLOCKS_I * BLOCKS_O))
    group = (pid // (BLOCKS_I * BLOCKS_O)) % GROUPS
    i0 = (pid // BLOCKS_O) % BLOCKS_I * BLOCK_I
    o0 = (pid % BLOCKS_O) * BLOCK_O
    begin = gl.load(job_begin_ptr + job)
    end = gl.load(job_end_ptr + job)
    is_turned = begin < 0
    count = gl.where(is_turned, begin - end, end - begin).to(gl.int32)
    last = count - 1
    begin = gl.where(is_turned, -1 - begin, begin)
    rows_ptr = gl.where(is_turned, out_rows_ptr, in_rows_ptr)
    out_rows_ptr = gl.where(is_turned, in_rows_ptr, out_rows_ptr) + begin
    in_rows_ptr = rows_ptr + begin
    feats_ptr += group * GROUP_IN
    grad_ptr += group * GROUP_OUT
    at_in = gl.arange(0, BLOCK_P, layout=gl.SliceLayout(1, A_LAYOUT))
    at_out = gl.arange(0, BLOCK_P, layout=gl.SliceLayout(1, B_LAYOUT))
    i = i0 + gl.arange(0, BLOCK_I, layout=gl.SliceLayout(0, A_LAYOUT))
    o = o0 + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(0, B_LAYOUT))
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_P, BLOCK_I], pairs_layout(BLOCK_I, UNIT, WGMMA))
    b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_P, BLOCK_O], pairs_layout(BLOCK_O, UNIT, WGMMA))
    acc = gl.zeros([BLOCK_I, BLOCK_O], gl.float32, layout=MMA)
    ii, oo = read_pairs(in_rows_ptr, out_rows_ptr, at_in, at_out, last)
    for s in gl.static_range(STAGES - 1):
        copy_rows(feats_ptr, a_shared.index(s), ii, stride_feats_n, i, GROUP_IN, EVEN_I, INDEX64)
        copy_rows(grad_ptr, b_shared.index(s), oo, stride_grad_n, o, GROUP_OUT, EVEN_O, INDEX64)
        async_copy.commit_group()
        at_in += BLOCK_P
        at_out += BLOCK_P
        ii, oo = read_pairs(in_rows_ptr, out_rows_ptr, at_in, at_out, last)
    use = 0
    fill = STAGES - 1
    for _ in range((count + BLOCK_P - 1) // BLOCK_P):
        async_copy.wait_group(STAGES - 2)
        acc = add_pairs(a_shared.index(use), b_shared.index(use), acc, UNIT, WGMMA)
        copy_rows(feats_ptr, a_shared.index(fill), ii, stride_feats_n, i, GROUP_IN, EVEN_I, INDEX64)
        copy_rows(grad_ptr, b_shared.index(fill), oo, stride_grad_n, o, GROUP_OUT, EVEN_O, INDEX64)
        async_copy.commit_group()
        at_in += BLOCK_P
        at_out += BLOCK_P
        ii, oo = read_pairs(in_rows_ptr, out_rows_ptr, at_in, at_out, last)
        use = gl.where(use == STAGES - 1, 0, use + 1)
        fill = gl.where(fill == STAGES - 1, 0, fill + 1)
    if WGMMA:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    async_copy.wait_group(0)
    rows = i0 + gl.arange(0, BLOCK_I, layout=gl.SliceLayout(1, MMA))
    columns = o0 + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(0, MMA))
    address = (rows * ALL_OUT)[:, None] + (group * GROUP_OUT + columns)[None, :]
    mask = (rows < GROUP_IN)[:, None] & (columns < GROUP_OUT)[None, :]
    out_ptr += job.to(gl.int64) * (GROUP_IN * ALL_OUT)
    gl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=mask)
