"""The weight gradient for Hopper in Gluon: pairs read a step ahead, rows by cp.async, products by wgmma or mma.

The pipeline is that of `gluon_kernels`, and so are its dtypes and channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sparseconv.backends.triton_implicit_gemm.gluon_kernels import copy_rows, row_layout, shared_layout


@gluon.constexpr_function
def takes_wgmma(rows, unit):
    """Whether wgmma sums a weight gradient: it takes halves, of 64 rows of the sums or more; mma takes all else."""
    return unit == 8 and rows >= 64


@gluon.constexpr_function
def pairs_layout(columns, unit, wgmma):
    """How the rows of pairs lie in shared memory: as wgmma reads them; for mma, so that 8 halves in each of 8 rows, or
    8 neighbours of single numbers in each of 4, which it takes at once, lie in different banks."""
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
    WIDE: gl.constexpr, HIDDEN: gl.constexpr, PRECISION: gl.constexpr,
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
        copy_rows(feats_ptr, a_shared.index(s), ii, stride_feats_n, i, GROUP_IN, EVEN_I, WIDE)
        copy_rows(grad_ptr, b_shared.index(s), oo, stride_grad_n, o, GROUP_OUT, EVEN_O, WIDE)
        async_copy.commit_group()
        at_in += BLOCK_P
        at_out += BLOCK_P
        ii, oo = read_pairs(in_rows_ptr, out_rows_ptr, at_in, at_out, last)
    use = 0
    fill = STAGES - 1
    for _ in range((count + BLOCK_P - 1) // BLOCK_P):
        async_copy.wait_group(STAGES - 2)
        acc = add_pairs(a_shared.index(use), b_shared.index(use), acc, UNIT, WGMMA)
        copy_rows(feats_ptr, a_shared.index(fill), ii, stride_feats_n, i, GROUP_IN, EVEN_I, WIDE)
        copy_rows(grad_ptr, b_shared.index(fill), oo, stride_grad_n, o, GROUP_OUT, EVEN_O, WIDE)
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
