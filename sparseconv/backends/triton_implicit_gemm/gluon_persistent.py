"""The implicit GEMM for Hopper by programs that stay: some warps copy, others multiply, and none waits for its kind.

The kernel of ``gluon_kernels`` has every warp copy and multiply in turn, and several small programs on a multiprocessor
fill each other's gaps. Tiles of 128 x 256 or 256 x 128 sums leave room for one program only; here its copying runs
ahead through a ring of buffers, over the end of a tile into the next one, while the products go on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparseconv.backends.triton_implicit_gemm.gluon_kernels import (
    copy_rows,
    copy_weight,
    gather_layout,
    out_layout,
    shared_layout,
    write_tile,
)

#: the barrier among the warps of a partition, by the name it has in this Triton
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def work_of(turn):
    """What a resident program does in its turn: forth and back through the programs, so that all get like sums."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def tile_of(tile_order_ptr, turn, num_work, PARTS: gl.constexpr):
    """The tile of a turn; any tile where there is no work left."""
    return gl.load(tile_order_ptr + gl.minimum(work_of(turn), num_work - 1) // PARTS)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The buffer after this one, and the phase of its barriers, which changes where the ring begins anew."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def produce(
    feats_ptr, weight_ptr, neighbors_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
    num_slots, list_stride, stride_feats_n, a_shared, b_shared, full, empty,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Copy rows and weight tiles of this program's tiles, one after another; what a tile begins with is read before."""
    BLOCKS_N: gl.constexpr = GROUP_OUT // BLOCK_N
    PARTS: gl.constexpr = GROUPS * BLOCKS_N
    LAYOUT: gl.constexpr = gather_layout(BLOCK_M, BLOCK_K, gl.num_warps())
    lane_rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    num_work = num_slots // BLOCK_M * PARTS
    slots = num_slots.to(gl.int64) if WIDE else num_slots
    tile = tile_of(tile_order_ptr, 0, num_work, PARTS)
    next_tile = tile_of(tile_order_ptr, 1, num_work, PARTS)
    count = gl.maximum(gl.load(tile_counts_ptr + tile), 1)
    row = gl.load(tile_rows_ptr + tile * list_stride)
    next_row = gl.load(tile_rows_ptr + tile * list_stride + 1)
    tap = gl.load(tile_taps_ptr + tile * list_stride)
    idx = gl.load(neighbors_ptr + (row * slots + tile * BLOCK_M) + lane_rows)
    stage = 0
    phase = 1
    for turn in range((num_work + gl.num_programs(0) - 1) // gl.num_programs(0)):
        work = work_of(turn)
        far_tile = tile_of(tile_order_ptr, turn + 2, num_work, PARTS)
        next_count = gl.load(tile_counts_ptr + next_tile)
        next_first = gl.load(tile_rows_ptr + next_tile * list_stride)
        if work < num_work:
            group = work // BLOCKS_N % GROUPS
            group_feats = feats_ptr + group * GROUP_IN
            group_weight = weight_ptr + group * (GROUP_IN if TRANSPOSED else GROUP_OUT)
            for i in range(count):
                last = i == count - 1  # then what is read ahead belongs to the next tile
                follows = gl.where(last, next_tile * list_stride - 1, tile * list_stride + i)
                start = gl.where(last, next_first, next_row) * slots + gl.where(last, next_tile, tile) * BLOCK_M
                next_idx = gl.load(neighbors_ptr + start + lane_rows)
                next_tap = gl.load(tile_taps_ptr + follows + 1)
                next_row = gl.load(tile_rows_ptr + follows + 2)
                for kb in range(GROUP_IN // BLOCK_K):
                    mbarrier.wait(empty.index(stage), phase)
                    copy_rows(
                        group_feats + kb * BLOCK_K, a_shared.index(stage), idx, stride_feats_n, columns, BLOCK_K,
                        True, WIDE,
                    )  # fmt: skip
                    copy_weight(
                        group_weight, b_shared.index(stage), tap, kb, work % BLOCKS_N * BLOCK_N, True,
                        GROUP_IN, GROUP_OUT, GROUPS, BLOCK_N, BLOCK_K, TRANSPOSED, WIDE,
                    )  # fmt: skip
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    stage, phase = next_stage(stage, phase, STAGES)
                idx = next_idx
                tap = next_tap
        tile = next_tile
        next_tile = far_tile
        count = gl.maximum(next_count, 1)


@gluon.jit
def consume(
    out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile_counts_ptr, tile_order_ptr, num_slots,
    a_shared, b_shared, full, empty, HALF: gl.constexpr,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, TO_SLOTS: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Multiply and write one half of the rows of this program's tiles."""
    BLOCKS_K: gl.constexpr = GROUP_IN // BLOCK_K
    BLOCKS_N: gl.constexpr = GROUP_OUT // BLOCK_N
    PARTS: gl.constexpr = GROUPS * BLOCKS_N
    ROWS: gl.constexpr = BLOCK_M // 2
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    LAYOUT: gl.constexpr = out_layout(ROWS, BLOCK_N, WARPS)
    lane_rows = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    num_work = num_slots // BLOCK_M * PARTS
    tile = tile_of(tile_order_ptr, 0, num_work, PARTS)
    next_tile = tile_of(tile_order_ptr, 1, num_work, PARTS)
    stage = 0
    phase = 0
    for turn in range((num_work + gl.num_programs(0) - 1) // gl.num_programs(0)):
        work = work_of(turn)
        far_tile = tile_of(tile_order_ptr, turn + 2, num_work, PARTS)
        # read here and not a turn ahead as in `produce`: Triton 3.6 takes a count carried here for the first one
        steps = gl.maximum(gl.load(tile_counts_ptr + tile), 1) * BLOCKS_K
        slots = tile * BLOCK_M + lane_rows
        out_rows = gl.load(out_rows_ptr + slots)
        if work < num_work:
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=MMA)
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                fence_async_shared()
                b = b_shared.index(stage).permute((1, 0)) if TRANSPOSED else b_shared.index(stage)
                acc = warpgroup_mma(a_shared.index(stage).slice(HALF * ROWS, ROWS), b, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
                thread_barrier()  # all four warps have done the step before: its buffers are free
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=step > 0)
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            thread_barrier()
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
            write_tile(
                acc, out_ptr, bias_ptr, residual_ptr, out_rows, slots, work % BLOCKS_N * BLOCK_N,
                GROUPS * GROUP_OUT, GROUP_OUT, work // BLOCKS_N % GROUPS, LAYOUT,
                HAS_BIAS, HAS_RESIDUAL, ACTIVATION, TO_SLOTS, WIDE,
            )  # fmt: skip
        tile = next_tile
        next_tile = far_tile


@gluon.jit
def persistent_conv_kernel(
    feats_ptr, weight_ptr, out_ptr, bias_ptr, residual_ptr,
    neighbors_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
    num_slots, list_stride, stride_feats_n, stride_weight_k, stride_weight_c, UNIT: gl.constexpr,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, PACK: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr,
    TO_SLOTS: gl.constexpr, WIDE: gl.constexpr, HIDDEN: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """``conv_kernel`` over all tiles by programs that stay: four warps copy, two halves of a tile are multiplied apart.

    Each weight tile is copied once for both halves. Channels come in whole blocks. A buffer is full when every copying
    thread's pieces have landed, and empty when both halves have multiplied it.
    """
    stride_feats_n *= UNIT
    DTYPE: gl.constexpr = feats_ptr.dtype.element_ty
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], shared_layout(BLOCK_K))
    if TRANSPOSED:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], shared_layout(BLOCK_K))
    else:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, BLOCK_N], shared_layout(BLOCK_N))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=128)
        mbarrier.init(empty.index(s), count=2)
    thread_barrier()
    # registers of a thread: 200 for the second half, 104 for the copies, which leaves 200 for the first half
    gl.warp_specialize(
        [
            (consume, (
                out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile_counts_ptr, tile_order_ptr, num_slots,
                a_shared, b_shared, full, empty, 0, GROUP_IN, GROUP_OUT, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                TRANSPOSED, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, TO_SLOTS, WIDE,
            )),
            (consume, (
                out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile_counts_ptr, tile_order_ptr, num_slots,
                a_shared, b_shared, full, empty, 1, GROUP_IN, GROUP_OUT, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                TRANSPOSED, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, TO_SLOTS, WIDE,
            )),
            (produce, (
                feats_ptr, weight_ptr, neighbors_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
                num_slots, list_stride, stride_feats_n, a_shared, b_shared, full, empty,
                GROUP_IN, GROUP_OUT, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED, WIDE,
            )),
        ],
        [4, 4],
        [200, 104],
    )  # fmt: skip
