"""The implicit GEMM in plain Triton: it runs wherever Triton does, the interpreter included."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseconv.geometry.gpu import lists as schedule
from sparseconv.gpu.launcher import IS_INTERPRETED

ROW_BITS = tl.constexpr(schedule.ROW_BITS)


@triton.jit
def load_index(ptr):
    """One int32 load; hidden in inline assembly so that the pipeliner does not stage it as it does the tiles."""
    return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def load_feats(ptr, idx, stride_n, channels, limit, EVEN: tl.constexpr, INDEX64: tl.constexpr):
    """Rows ``idx`` of a feature matrix at ``channels``; zeros where a row is absent or a channel is past the end."""
    start = idx.to(tl.int64) * stride_n if INDEX64 else idx * stride_n
    if EVEN:
        mask = (idx >= 0)[:, None]
    else:
        mask = (idx >= 0)[:, None] & (channels < limit)[None, :]
    return tl.load(ptr + (start[:, None] + channels[None, :]), mask=mask, other=0.0)


@triton.jit
def load_weight(
    weight_ptr, tap, k0, n0, pack, stride_k, stride_c,
    GROUP_IN: tl.constexpr, GROUP_OUT: tl.constexpr, PACK: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr, INDEX64: tl.constexpr,
):  # fmt: skip
    """The (BLOCK_K, BLOCK_N) weight tile of a tap for one pack of groups: block-diagonal where groups are packed."""
    PACK_IN: tl.constexpr = PACK * GROUP_IN
    PACK_OUT: tl.constexpr = PACK * GROUP_OUT
    EVEN: tl.constexpr = PACK_IN % BLOCK_K == 0 and PACK_OUT % BLOCK_N == 0 and GROUPS % PACK == 0
    k = k0 + tl.arange(0, BLOCK_K)  # contracted channel of the pack
    n = n0 + tl.arange(0, BLOCK_N)  # produced channel of the pack
    start = tap.to(tl.int64) * stride_k if INDEX64 else tap * stride_k
    if TRANSPOSED:  # tile read as (BLOCK_N, BLOCK_K): the channels contracted are the weight's last axis
        rows = n % GROUP_OUT if PACK > 1 else n
        address = rows[:, None] * stride_c + (pack * PACK_IN + k)[None, :]
        if PACK == 1 and EVEN:
            tile = tl.load(weight_ptr + (start + address))
        else:
            ok = ((n < PACK_OUT) & (pack * PACK_OUT + n < GROUPS * GROUP_OUT))[:, None]
            ok = ok & ((k < PACK_IN) & (pack * PACK_IN + k < GROUPS * GROUP_IN))[None, :]
            if PACK > 1:
                ok = ok & ((n // GROUP_OUT)[:, None] == (k // GROUP_IN)[None, :])
            tile = tl.load(weight_ptr + (start + address), mask=ok, other=0.0)
        return tl.trans(tile)
    else:
        rows = k % GROUP_IN if PACK > 1 else k
        address = rows[:, None] * stride_c + (pack * PACK_OUT + n)[None, :]
        if PACK == 1 and EVEN:
            return tl.load(weight_ptr + (start + address))
        else:
            ok = ((k < PACK_IN) & (pack * PACK_IN + k < GROUPS * GROUP_IN))[:, None]
            ok = ok & ((n < PACK_OUT) & (pack * PACK_OUT + n < GROUPS * GROUP_OUT))[None, :]
            if PACK > 1:
                ok = ok & ((k // GROUP_IN)[:, None] == (n // GROUP_OUT)[None, :])
            return tl.load(weight_ptr + (start + address), mask=ok, other=0.0)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b. The interpreter holds bfloat16 as bare bits, which its product would take for integers."""
    if a.dtype == tl.int8:
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    elif IS_INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rescaled(sums, residual, numbers_ptr, columns, column_ok, ALL_OUT: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """8 bits of sums and a residual of 8 bits, see `sparseconv.backends.integers` and `.float8`.

    Behind the bias, ``numbers_ptr`` has ALL_OUT multipliers. Integers, in int64 until they are rounded, have a shift,
    the residual's multiplier, a slope and the least value there; float8 has the residual's multiplier and a slope.
    """
    multiplier = tl.load(numbers_ptr + ALL_OUT + columns, mask=column_ok, other=0)
    numbers_ptr += 2 * ALL_OUT
    if sums.dtype == tl.float32:
        scaled = sums * multiplier[None, :]
        if HAS_RESIDUAL:
            scaled += residual.to(tl.float32) * tl.load(numbers_ptr)
        scaled = tl.where(scaled < 0, scaled * tl.load(numbers_ptr + 1), scaled)
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    else:
        shift = tl.load(numbers_ptr).to(tl.int64)
        slope = tl.load(numbers_ptr + 2).to(tl.int64)
        least = tl.load(numbers_ptr + 3).to(tl.int64)
        total = sums.to(tl.int64) * multiplier.to(tl.int64)[None, :]
        if HAS_RESIDUAL:
            total += residual.to(tl.int64) * tl.load(numbers_ptr + 1).to(tl.int64)
        value = (total + (tl.full((), 1, tl.int64) << (shift - 1))) >> shift
        value = tl.where(value < 0, (value * slope + 32768) >> 16, value)
        return tl.minimum(tl.maximum(value, least), 127)


@triton.jit
def conv_kernel(
    feats_ptr,  # (N_in, GROUPS * GROUP_IN)
    weight_ptr,  # (K, C / G, C'): forward (GROUP_IN, GROUPS * GROUP_OUT), transposed (GROUP_OUT, GROUPS * GROUP_IN)
    out_ptr,  # (N_out, GROUPS * GROUP_OUT), or TO_SLOTS fp32 sums (NP, GROUPS * GROUP_OUT)
    bias_ptr, residual_ptr,  # (GROUPS * GROUP_OUT,), (N_out, GROUPS * GROUP_OUT)
    neighbors_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
    num_slots, list_stride, stride_feats_n, stride_weight_k, stride_weight_c, UNIT: tl.constexpr,
    GROUP_IN: tl.constexpr, GROUP_OUT: tl.constexpr, PACK: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    TO_SLOTS: tl.constexpr, INDEX64: tl.constexpr, ASM_LOADS: tl.constexpr, PRECISION: tl.constexpr,
    RESCALE: tl.constexpr,
):  # fmt: skip
    """y[out_rows[slot]] = act(sum over live taps of x[neighbors[tap, slot]] @ w[tap] + bias + residual), one tile.

    int8 features have int32 sums. With RESCALE ``bias_ptr`` has more behind the bias, see `rescaled`.
    """
    stride_feats_n *= UNIT  # a factor that the compiler sees: it proves that pieces of 16 bytes are aligned
    stride_weight_k *= UNIT
    stride_weight_c *= UNIT
    PACK_IN: tl.constexpr = PACK * GROUP_IN
    PACK_OUT: tl.constexpr = PACK * GROUP_OUT
    ALL_OUT: tl.constexpr = GROUPS * GROUP_OUT
    NUM_PACKS: tl.constexpr = (GROUPS + PACK - 1) // PACK
    BLOCKS_K: tl.constexpr = (PACK_IN + BLOCK_K - 1) // BLOCK_K
    BLOCKS_N: tl.constexpr = (PACK_OUT + BLOCK_N - 1) // BLOCK_N
    EVEN_K: tl.constexpr = PACK_IN % BLOCK_K == 0 and GROUPS % PACK == 0
    pid = tl.program_id(0)
    tile = tl.load(tile_order_ptr + pid // (NUM_PACKS * BLOCKS_N))
    pack = (pid // BLOCKS_N) % NUM_PACKS
    n0 = (pid % BLOCKS_N) * BLOCK_N
    first = tile * BLOCK_M
    ms = tl.arange(0, BLOCK_M)
    slots = first + ms
    neighbors_ptr += first  # a step then adds one number to it, not one for each row
    list_start = tile * list_stride
    steps = tl.load(tile_counts_ptr + tile) * BLOCKS_K
    ks = tl.arange(0, BLOCK_K)
    in_base = feats_ptr + pack * PACK_IN
    limit = PACK_IN if GROUPS % PACK == 0 else tl.minimum(GROUPS * GROUP_IN - pack * PACK_IN, PACK_IN)
    if feats_ptr.dtype.element_ty == tl.int8:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ASM_LOADS:
        tap = tl.load(tile_taps_ptr + list_start)
        row = tl.load(tile_rows_ptr + list_start) & ROW_BITS
        row = row.to(tl.int64) if INDEX64 else row
        idx = tl.load(neighbors_ptr + row * num_slots + ms)
        kb = 0
        for step in tl.range(steps, num_stages=STAGES):
            k0 = kb * BLOCK_K
            a = load_feats(in_base, idx, stride_feats_n, k0 + ks, limit, EVEN_K, INDEX64)
            b = load_weight(
                weight_ptr, tap, k0, n0, pack, stride_weight_k, stride_weight_c,
                GROUP_IN, GROUP_OUT, PACK, GROUPS, BLOCK_K, BLOCK_N, TRANSPOSED, INDEX64,
            )  # fmt: skip
            acc = product(a, b, acc, PRECISION)
            kb = (step + 1) % BLOCKS_K
            at = list_start + (step + 1) // BLOCKS_K
            tap = load_index(tile_taps_ptr + at)
            row = load_index(tile_rows_ptr + at) & ROW_BITS
            row = row.to(tl.int64) if INDEX64 else row
            idx = load_index(neighbors_ptr + row * num_slots + ms)
    else:
        for step in tl.range(steps, num_stages=STAGES):
            k0 = (step % BLOCKS_K) * BLOCK_K
            at = list_start + step // BLOCKS_K
            tap = tl.load(tile_taps_ptr + at)
            row = tl.load(tile_rows_ptr + at) & ROW_BITS
            row = row.to(tl.int64) if INDEX64 else row
            idx = tl.load(neighbors_ptr + row * num_slots + ms)
            a = load_feats(in_base, idx, stride_feats_n, k0 + ks, limit, EVEN_K, INDEX64)
            b = load_weight(
                weight_ptr, tap, k0, n0, pack, stride_weight_k, stride_weight_c,
                GROUP_IN, GROUP_OUT, PACK, GROUPS, BLOCK_K, BLOCK_N, TRANSPOSED, INDEX64,
            )  # fmt: skip
            acc = product(a, b, acc, PRECISION)
    n = n0 + tl.arange(0, BLOCK_N)
    columns = pack * PACK_OUT + n
    column_ok = (n < PACK_OUT) & (columns < ALL_OUT)
    if TO_SLOTS:  # of a tile without a live tap nothing is read
        rows = slots
        there = tl.where(steps > 0, slots, -1) >= 0
    else:
        rows = tl.load(out_rows_ptr + slots)
        there = rows >= 0
    rows = rows.to(tl.int64) if INDEX64 else rows
    address = rows[:, None] * ALL_OUT + columns[None, :]
    mask = there[:, None] & column_ok[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_ok, other=0.0).to(acc.dtype)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + address, mask=mask, other=0.0)
        if RESCALE:
            acc = rescaled(acc, residual, bias_ptr, columns, column_ok, ALL_OUT, True)
        else:
            acc += residual.to(acc.dtype)
    elif RESCALE:
        acc = rescaled(acc, acc, bias_ptr, columns, column_ok, ALL_OUT, False)
    if ACTIVATION is not None:
        acc = ACTIVATION(acc)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    partial_ptr, out_ptr, bias_ptr, residual_ptr, slots_ptr, num_out,
    NUM_GROUPS: tl.constexpr, C_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[row] = act(sum over tap groups, in their order, of partial[slots[group, row]] + bias + residual)."""
    BLOCKS_N: tl.constexpr = (C_OUT + BLOCK_N - 1) // BLOCK_N
    rows = (tl.program_id(0) // BLOCKS_N).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % BLOCKS_N * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < num_out
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        slot = tl.load(slots_ptr + (group * num_out + rows), mask=row_ok, other=-1)
        mask = (slot >= 0)[:, None] & (n < C_OUT)[None, :]
        acc += tl.load(partial_ptr + (slot.to(tl.int64)[:, None] * C_OUT + n[None, :]), mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < C_OUT, other=0.0).to(tl.float32)[None, :]
    address = rows[:, None] * C_OUT + n[None, :]
    mask = row_ok[:, None] & (n < C_OUT)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        acc = ACTIVATION(acc)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_pair(ptr, start, ps, count, ASM_LOADS: tl.constexpr):
    """Row numbers at positions ``start + ps`` of a job's list, -1 beyond its ``count``; hidden as in `load_index`."""
    ptr += start
    count -= start
    if ASM_LOADS:  # by a predicate: an address that is clamped, and a value then dropped, take more instructions
        return tl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1];}",
            "=r,l,r,r", [ptr + ps, ps, count], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(ptr + ps, mask=ps < count, other=-1)


@triton.jit
def weight_grad_kernel(
    feats_ptr,  # (N_in, GROUPS * GROUP_IN)
    grad_ptr,  # (N_out, GROUPS * GROUP_OUT)
    out_ptr,  # fp32 (J, GROUP_IN, GROUPS * GROUP_OUT) partial sums, or (K, ...) of the weight's dtype: one job per tap
    in_rows_ptr, out_rows_ptr, job_begin_ptr, job_end_ptr, job_order_ptr,
    stride_feats_n, stride_grad_n, UNIT: tl.constexpr,
    GROUP_IN: tl.constexpr, GROUP_OUT: tl.constexpr, PACK: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
    INDEX64: tl.constexpr, ASM_LOADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[job] = sum over the job's pairs of x[in]^T g[out]; a job is a run of one tap's pairs, see `Jobs`."""
    stride_feats_n *= UNIT
    stride_grad_n *= UNIT
    PACK_IN: tl.constexpr = PACK * GROUP_IN
    PACK_OUT: tl.constexpr = PACK * GROUP_OUT
    ALL_OUT: tl.constexpr = GROUPS * GROUP_OUT
    NUM_PACKS: tl.constexpr = (GROUPS + PACK - 1) // PACK
    BLOCKS_I: tl.constexpr = (PACK_IN + BLOCK_I - 1) // BLOCK_I
    BLOCKS_O: tl.constexpr = (PACK_OUT + BLOCK_O - 1) // BLOCK_O
    EVEN_I: tl.constexpr = PACK_IN % BLOCK_I == 0 and GROUPS % PACK == 0
    EVEN_O: tl.constexpr = PACK_OUT % BLOCK_O == 0 and GROUPS % PACK == 0
    pid = tl.program_id(0)
    job = tl.load(job_order_ptr + pid // (NUM_PACKS * BLOCKS_I * BLOCKS_O))
    pack = (pid // (BLOCKS_I * BLOCKS_O)) % NUM_PACKS
    i0 = (pid // BLOCKS_O) % BLOCKS_I * BLOCK_I
    o0 = (pid % BLOCKS_O) * BLOCK_O
    begin = tl.load(job_begin_ptr + job)
    end = tl.load(job_end_ptr + job)
    is_turned = begin < 0
    count = tl.where(is_turned, begin - end, end - begin).to(tl.int32)
    begin = tl.where(is_turned, -1 - begin, begin)
    rows_ptr = tl.where(is_turned, out_rows_ptr, in_rows_ptr)
    out_rows_ptr = tl.where(is_turned, in_rows_ptr, out_rows_ptr) + begin
    in_rows_ptr = rows_ptr + begin
    i = i0 + tl.arange(0, BLOCK_I)
    o = o0 + tl.arange(0, BLOCK_O)
    in_limit = PACK_IN if GROUPS % PACK == 0 else tl.minimum(GROUPS * GROUP_IN - pack * PACK_IN, PACK_IN)
    out_limit = PACK_OUT if GROUPS % PACK == 0 else tl.minimum(ALL_OUT - pack * PACK_OUT, PACK_OUT)
    feats_ptr += pack * PACK_IN
    grad_ptr += pack * PACK_OUT
    ps = tl.arange(0, BLOCK_P)
    acc = tl.zeros((BLOCK_I, BLOCK_O), tl.float32)
    if ASM_LOADS:
        ii = load_pair(in_rows_ptr, 0, ps, count, ASM_LOADS)
        oo = load_pair(out_rows_ptr, 0, ps, count, ASM_LOADS)
        for p in tl.range(0, count, BLOCK_P, num_stages=STAGES):
            a = load_feats(feats_ptr, ii, stride_feats_n, i, in_limit, EVEN_I, INDEX64)
            b = load_feats(grad_ptr, oo, stride_grad_n, o, out_limit, EVEN_O, INDEX64)
            acc = product(tl.trans(a), b, acc, PRECISION)
            ii = load_pair(in_rows_ptr, p + BLOCK_P, ps, count, ASM_LOADS)
            oo = load_pair(out_rows_ptr, p + BLOCK_P, ps, count, ASM_LOADS)
    else:
        for p in tl.range(0, count, BLOCK_P, num_stages=STAGES):
            ii = load_pair(in_rows_ptr, p, ps, count, ASM_LOADS)
            oo = load_pair(out_rows_ptr, p, ps, count, ASM_LOADS)
            a = load_feats(feats_ptr, ii, stride_feats_n, i, in_limit, EVEN_I, INDEX64)
            b = load_feats(grad_ptr, oo, stride_grad_n, o, out_limit, EVEN_O, INDEX64)
            acc = product(tl.trans(a), b, acc, PRECISION)
    rows = i % GROUP_IN if PACK > 1 else i
    mask = (i < in_limit)[:, None] & (o < out_limit)[None, :]
    if PACK > 1:
        mask = mask & ((i // GROUP_IN)[:, None] == (o // GROUP_OUT)[None, :])
    address = rows[:, None] * ALL_OUT + (pack * PACK_OUT + o)[None, :]
    out_ptr += job.to(tl.int64) * (GROUP_IN * ALL_OUT)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_jobs_kernel(partial_ptr, out_ptr, tap_jobs_ptr, size, BLOCK: tl.constexpr):
    """dw[tap] = sum of partial[job] over the tap's jobs, in their order; eight of them are on their way together."""
    blocks = (size + BLOCK - 1) // BLOCK
    tap = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(tap_jobs_ptr + tap)
    stop = tl.load(tap_jobs_ptr + tap + 1)
    from_ptr = partial_ptr + first.to(tl.int64) * size + at
    acc = tl.zeros((BLOCK,), tl.float32)
    for job in tl.range(first, stop, 8):
        parts = ()  # type: tuple
        for step in tl.static_range(8):
            end = tl.where(job + step < stop, size, 0)
            parts = parts + (tl.load(from_ptr + step * size, mask=at < end, other=0.0),)
        for step in tl.static_range(8):
            acc += parts[step]
        from_ptr += 8 * size
    tl.store(out_ptr + (tap.to(tl.int64) * size + at), acc.to(out_ptr.dtype.element_ty), mask=at < size)
