"""The implicit GEMM for Hopper with warps of two kinds: four copy, and twice four multiply half a tile's rows each.

Warps that only copy run ahead as far as there are buffers, beyond the end of a tile too: rows come by cp.async, weight
tiles by the copy engine. Each half passes over the taps at which none of its own rows has a neighbour. A program makes
one tile after another, so that the rows of the next are on their way while the sums of this one are written.
Channels in whole tiles and rounds of all buffers, one group, all taps in one launch, the weight as a descriptor; else
as in `gluon_kernels`.
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
    copy_tile,
    gather_layout,
    places_of,
    read_step,
    shared_layout,
    write_tile,
)
from sparseconv.geometry.gpu.tiles.schedule import HALF_BIT

#: all warps of a partition meet, by the name it has in this Triton
meet = getattr(gl, "thread_barrier", None) or gl.barrier
FIRST_HALF = gl.constexpr(HALF_BIT)


@gluon.constexpr_function
def quad_layout(rows, columns, warps, unit):
    """Pieces of ``unit`` numbers, each of which four neighbouring lanes hold together where wgmma leaves its sums: from
    there to here numbers move among those four lanes only."""
    held = [[0, 1 << bit] for bit in range((unit - 1).bit_length())]
    lanes = [[0, unit], [0, 2 * unit], [1, 0], [2, 0], [4, 0]]
    held += [[8, 0], *([0, 4 * unit << bit] for bit in range((columns // (4 * unit) - 1).bit_length()))]
    spread = [[16 << bit, 0] for bit in range((warps - 1).bit_length())]
    held += [[16 * warps << bit, 0] for bit in range((rows // (16 * warps) - 1).bit_length())]
    return gl.DistributedLinearLayout(held, lanes, spread, [], [rows, columns])


@gluon.jit
def work_of(turn):
    """The number of a program's turn-th tile, there and back over the programs: lists begin with the longest."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def copy_tiles(
    feats_ptr, weight, neighbors_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
    num_slots, num_work, list_stride, stride_feats_n, a_shared, b_shared, full, empty,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, ROW: gl.constexpr, TRANSPOSED: gl.constexpr, WIDE: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """What the warps that copy do: rows and a weight tile for each step, once both halves have read those before."""
    STAGES: gl.constexpr = a_shared.shape[0]
    BLOCK_M: gl.constexpr = a_shared.shape[1]
    BLOCK_K: gl.constexpr = a_shared.shape[2]
    BLOCK_N: gl.constexpr = b_shared.shape[1] if TRANSPOSED else b_shared.shape[2]
    BLOCKS_N: gl.constexpr = GROUP_OUT // BLOCK_N
    LAYOUT: gl.constexpr = gather_layout(BLOCK_M, BLOCK_K, gl.num_warps(), UNIT)
    lane_rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    phase = 1
    for turn in range((num_work + gl.num_programs(0) - 1) // gl.num_programs(0)):
        work = work_of(turn)
        if work < num_work:
            tile = gl.load(tile_order_ptr + work // BLOCKS_N)
            n0 = work % BLOCKS_N * BLOCK_N
            slots = tile * BLOCK_M + lane_rows
            start = tile * list_stride
            count = gl.load(tile_counts_ptr + tile)
            row = gl.load(tile_rows_ptr + start)
            idx, tap, row = read_step(
                tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, start, row, 0, count, 1, WIDE
            )
            for step in range(count):
                next_idx, next_tap, row = read_step(
                    tile_rows_ptr, tile_taps_ptr, neighbors_ptr, num_slots, slots, start, row, step + 1, count, 1, WIDE
                )
                for k0 in range(0, GROUP_IN, STAGES * BLOCK_K):
                    for s in gl.static_range(STAGES):
                        k = k0 + s * BLOCK_K
                        mbarrier.wait(empty.index(s), phase)
                        copy_rows(feats_ptr + k, a_shared.index(s), idx, stride_feats_n, columns, BLOCK_K, True, WIDE)
                        place = [tap * ROW + n0, k] if TRANSPOSED else [tap * GROUP_IN + k, n0]
                        mbarrier.expect(full.index(s), BLOCK_K * BLOCK_N * (16 // UNIT))
                        copy_tile(weight, place, full.index(s), b_shared.index(s))
                        async_copy.mbarrier_arrive(full.index(s), increment_count=False)
                    phase ^= 1
                idx = next_idx
                tap = next_tap


@gluon.jit
def give_back(empty, s: gl.constexpr, held):
    """Say that the warps of a half have read the buffers of step ``s``, if they held them."""
    meet()
    mbarrier.arrive(empty.index(s), count=1, pred=held == 1)


@gluon.jit
def multiply_half(
    out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_order_ptr, num_work,
    list_stride, a_shared, b_shared, full, empty, HALF: gl.constexpr,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, ROW: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """What the warps of a half do: sums of products, tap after tap with a neighbour in it, then the result's rows.

    Addresses of these are of 64 bits always: the compiler then adds constants to one, and keeps no register for each.
    """
    STAGES: gl.constexpr = a_shared.shape[0]
    BLOCK_M: gl.constexpr = a_shared.shape[1]
    BLOCK_K: gl.constexpr = a_shared.shape[2]
    BLOCK_N: gl.constexpr = b_shared.shape[1] if TRANSPOSED else b_shared.shape[2]
    BLOCKS_N: gl.constexpr = GROUP_OUT // BLOCK_N
    ROWS: gl.constexpr = BLOCK_M // 2
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 2 * UNIT]
    )
    LAYOUT: gl.constexpr = quad_layout(ROWS, BLOCK_N, WARPS, UNIT)
    phase = 0
    for turn in range((num_work + gl.num_programs(0) - 1) // gl.num_programs(0)):
        work = work_of(turn)
        if work < num_work:
            tile = gl.load(tile_order_ptr + work // BLOCKS_N)
            count = gl.load(tile_counts_ptr + tile)
            tile_rows = tile_rows_ptr + tile * list_stride
            first = tile * BLOCK_M + HALF * ROWS
            n0 = work % BLOCKS_N * BLOCK_N
            if HAS_RESIDUAL:  # sums begin with it: later there would be no registers for it
                places, _all = places_of(
                    out_rows_ptr, first, count, n0, 0, ROWS, BLOCK_N, GROUP_OUT, ROW, LAYOUT, False, True
                )
                acc = gl.convert_layout(gl.load(residual_ptr + places), MMA).to(gl.float32)
            else:
                acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=MMA)
            held = 0  # whether wgmma may still read the buffers of the last step
            row = gl.load(tile_rows)
            for step in range(count):
                live = (row >> (FIRST_HALF + HALF)) & 1
                row = gl.load(tile_rows + step + 1)
                if live == 1:
                    for _ in range(0, GROUP_IN, STAGES * BLOCK_K):
                        for s in gl.static_range(STAGES):
                            mbarrier.wait(full.index(s), phase)
                            fence_async_shared()
                            b = b_shared.index(s).permute((1, 0)) if TRANSPOSED else b_shared.index(s)
                            acc = warpgroup_mma(a_shared.index(s).slice(HALF * ROWS, ROWS), b, acc, is_async=True)
                            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
                            give_back(empty, (s + STAGES - 1) % STAGES, held)
                            held = 1
                        phase ^= 1
                else:
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
                    give_back(empty, STAGES - 1, held)
                    for _ in range(0, GROUP_IN, STAGES * BLOCK_K):
                        for s in gl.static_range(STAGES):
                            mbarrier.wait(full.index(s), phase)
                            mbarrier.arrive(empty.index(s), count=1)
                        phase ^= 1
                    held = 0
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            give_back(empty, STAGES - 1, held)
            write_tile(
                acc, out_ptr, bias_ptr, residual_ptr, out_rows_ptr, first, count, n0, 0, 1, GROUP_OUT, LAYOUT,
                HAS_BIAS, False, ACTIVATION, ROW, False, False, False, True, False,
            )  # fmt: skip


@gluon.jit
def conv_kernel(
    feats_ptr, weight, out_ptr, bias_ptr, residual_ptr,
    neighbors_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
    num_slots, list_stride, stride_feats_n, stride_weight_k, stride_weight_c, UNIT: gl.constexpr,
    GROUP_IN: gl.constexpr, GROUP_OUT: gl.constexpr, PACK: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr,
    ROW: gl.constexpr, TO_SLOTS: gl.constexpr, LEADS: gl.constexpr, FOLLOWS: gl.constexpr, WIDE: gl.constexpr,
    HIDDEN: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """`gluon_kernels.conv_kernel` of all taps in one launch, by any number of programs."""
    gl.static_assert(GROUP_IN % (STAGES * BLOCK_K) == 0 and GROUP_OUT % BLOCK_N == 0 and GROUPS == 1)
    gl.static_assert(not (TO_SLOTS or LEADS or FOLLOWS))
    stride_feats_n *= UNIT  # a factor that the compiler sees: it proves that pieces of 16 bytes are aligned
    num_work = num_slots // BLOCK_M * (GROUP_OUT // BLOCK_N)
    DTYPE: gl.constexpr = feats_ptr.dtype.element_ty
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], shared_layout(BLOCK_K, UNIT))
    if TRANSPOSED:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], shared_layout(BLOCK_K, UNIT))
    else:
        b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, BLOCK_N], shared_layout(BLOCK_N, UNIT))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129)  # the threads that copy rows, and the one that asks for the weight
        mbarrier.init(empty.index(s), count=2)  # the halves
    fence_async_shared()
    meet()
    gl.warp_specialize(
        [
            (multiply_half, (
                out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_order_ptr,
                num_work, list_stride, a_shared, b_shared, full, empty, 0,
                GROUP_IN, GROUP_OUT, TRANSPOSED, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, ROW, UNIT,
            )),
            (multiply_half, (
                out_ptr, bias_ptr, residual_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_order_ptr,
                num_work, list_stride, a_shared, b_shared, full, empty, 1,
                GROUP_IN, GROUP_OUT, TRANSPOSED, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, ROW, UNIT,
            )),
            (copy_tiles, (
                feats_ptr, weight, neighbors_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, tile_order_ptr,
                num_slots, num_work, list_stride, stride_feats_n, a_shared, b_shared, full, empty,
                GROUP_IN, GROUP_OUT, ROW, TRANSPOSED, WIDE, UNIT,
            )),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip
