"""Shapes and strides of a call: broadcasting, the layout of outputs, and the fewest axes that the kernel must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparseconv.pointwise.schema import Config

Ints = tuple[int, ...]
_INT32_LIMIT = 2**31 - 2**20  # below it, coordinates of a last, partly filled tile still fit
#: halves along one axis from which programs are as wide as they come, if all are full: memory gives more where
#: neighbors are asked for together, but the registers of a mask would leave a multiprocessor one program, not two
MANY_HALVES = 2**24


def broadcast_shape(shapes: Sequence[Sequence[int]], what: str = "operands") -> Ints:
    """The shape that all shapes broadcast to.

    Example:
        >>> broadcast_shape([(4, 1), (3,)])
        (4, 3)
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for k, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if result[k] != 1 and result[k] != size:
                    raise ValueError(f"{what}: shapes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast")
                result[k] = size
    return tuple(result)


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> Ints:
    """Strides of an operand over the target shape: 0 on every axis along which it is repeated."""
    lead = len(target) - len(shape)
    return (0,) * lead + tuple(0 if n == 1 and t != 1 else s for n, s, t in zip(shape, strides, target[lead:]))


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Row-major strides."""
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(shape[k + 1], 1)
    return tuple(strides)


def output_strides(shape: Sequence[int], operands: Sequence[Ints]) -> Ints:
    """Strides of a new, dense output: the axis order of the operands, the first ones deciding, as torch does it.

    Args:
        shape: the broadcast shape.
        operands: strides of the tensor arguments over that shape.

    Source: the ordering of dimensions in torch's TensorIterator (an insertion sort with undecided comparisons).
    """
    rank = len(shape)
    plain = contiguous_strides(shape)
    if all(all(n == 1 or a == b for n, a, b in zip(shape, s, plain)) for s in operands):
        return plain
    order = list(range(rank - 1, -1, -1))  # fastest axis first
    for i in range(1, rank):
        later = i
        for earlier in range(i - 1, -1, -1):
            decision = _order(shape, operands, order[earlier], order[later])
            if decision > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
            elif decision < 0:
                break
    strides = [1] * rank
    step = 1
    for axis in order:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def _order(shape: Sequence[int], operands: Sequence[Ints], a: int, b: int) -> int:
    """-1: axis a is faster than axis b; 1: slower; 0: no operand can tell."""
    for strides in operands:
        stride_a, stride_b = abs(strides[a]), abs(strides[b])
        if stride_a == 0 or stride_b == 0:
            continue
        if stride_a != stride_b:
            return -1 if stride_a < stride_b else 1
        if shape[a] > shape[b]:
            return 1
    return 0


@dataclass(frozen=True)
class Iteration:
    """The task space of a kernel: axes from slow to fast, the last two of which are tiled.

    ``sizes`` (R,); ``strides`` of each operand (R,), outputs first; ``tile`` rows and columns; ``wide`` if addresses
    need 64 bits; ``across`` if some operand's fast axis is the second last; ``warps`` of a program.
    """

    sizes: Ints
    strides: tuple[Ints, ...]
    tile: Ints
    wide: bool
    across: bool
    warps: int = 4

    @property
    def parts(self) -> int:
        """2 if full tiles are to go without a mask, since masks whose end is no multiple of 16 make accesses narrow."""
        if self.full:
            return 1
        ends = list(zip(self.sizes[::-1], self.tile[::-1]))[: 2 if self.across else 1]
        return 2 if any(size % 16 and size >= tile for size, tile in ends) else 1

    @property
    def full(self) -> bool:
        """Whether every tile is full, so that nothing needs a mask."""
        return all(size % tile == 0 for size, tile in zip(self.sizes[::-1], self.tile[::-1]))

    @property
    def programs(self) -> int:
        """Tiles, each the work of one program."""
        outer = len(self.sizes) - len(self.tile)
        count = 1
        for k, size in enumerate(self.sizes):
            count *= -(-size // self.tile[k - outer]) if k >= outer else size
        return count


def iterate(
    shape: Sequence[int],
    operands: Sequence[Ints],
    *,
    itemsize: int,
    config: Config,
    collapse: bool = True,
    reach: int = 0,
) -> Iteration:
    """The task space for operands (outputs first) of these strides over ``shape``.

    With ``collapse``, axes of size 1 vanish and neighbors that every operand steps through alike become one, so that
    dense operands of one stride order have rank 1; without it the rank stays. ``reach`` is the highest address that
    strides do not show (of gathered arguments).
    """
    axes = [k for k, n in enumerate(shape) if n != 1 or not collapse]
    axes.sort(key=lambda k: tuple(-abs(s[k]) for s in operands))
    sizes = [shape[k] for k in axes]
    columns = [tuple(s[k] for s in operands) for k in axes]  # strides of all operands along an axis
    if collapse:
        sizes, columns = _merge(sizes, columns)
    if not sizes:
        sizes, columns = [1], [(0,) * len(operands)]
    rows, across = _row_axis(sizes, columns) if len(sizes) > 1 and config.tile_axes == 2 else (len(sizes) - 2, False)
    if rows >= 0:
        sizes.insert(-1, sizes.pop(rows))
        columns.insert(-1, columns.pop(rows))
    strides = tuple(tuple(column[i] for column in columns) for i in range(len(operands)))
    extents = [sum((n - 1) * abs(s) for n, s in zip(sizes, line)) for line in strides]
    wide = max([reach, *extents, *sizes]) >= _INT32_LIMIT
    elements, warps = _program(sizes, len(operands), across, itemsize, config)
    return Iteration(tuple(sizes), strides, _tile(sizes, strides, across, elements, config), wide, across, warps)


def _program(sizes: Sequence[int], operands: int, across: bool, itemsize: int, config: Config) -> tuple[int, int]:
    """Elements and warps of a program."""
    # 16 bytes for each of 128 threads, twice over: enough loads in flight to fill the memory of a large GPU.
    elements, warps = (4096, 8) if across else (max(256, 4096 // max(itemsize, 1)), 4)
    if len(sizes) == 1 and itemsize <= 2 and operands >= 3:
        warps = 8  # halves along one axis fill it best with 8 elements per thread, if they do little else than move
        free = config.elements is None and config.num_warps is None
        if free and itemsize == 2 and sizes[0] >= MANY_HALVES and sizes[0] % 8192 == 0:
            elements, warps = 8192, 32
    return config.elements or elements, config.num_warps or warps


def _merge(sizes: list[int], columns: list[Ints]) -> tuple[list[int], list[Ints]]:
    merged_sizes: list[int] = []
    merged: list[Ints] = []
    for size, column in zip(sizes, columns):
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1], column)):
            merged_sizes[-1] *= size
            merged[-1] = column
        else:
            merged_sizes.append(size)
            merged.append(column)
    return merged_sizes, merged


def _row_axis(sizes: list[int], columns: list[Ints]) -> tuple[int, bool]:
    """The second axis to tile: the fast axis of an operand that is not fast along the last one, if any."""
    last = len(sizes) - 1
    for operand in range(len(columns[0])):
        steps = {k: abs(columns[k][operand]) for k in range(last + 1) if columns[k][operand] and sizes[k] > 1}
        fast = min(steps, key=lambda k: (steps[k], -k), default=last)
        if fast != last and steps.get(last, 0) > steps[fast]:
            return fast, True
    second = last - 1
    if sizes[second] * sizes[last] < 256:
        second = max(range(last), key=lambda k: (sizes[k], k))
    return second, False


def _tile(sizes: Sequence[int], strides: Sequence[Ints], across: bool, elements: int, config: Config) -> Ints:
    if len(sizes) == 1:
        return (elements,)
    if config.tile_axes == 1:
        return (min(elements, _power(sizes[-1])),)
    repeated = any(line[-2] == 0 and line[-1] != 0 for line in strides)
    columns = config.columns or (64 if across else elements // 8 if repeated else elements)
    columns = min(columns, elements, _power(sizes[-1]))
    rows = min(elements // columns, _power(sizes[-2]))
    return (rows, min(elements // rows, _power(sizes[-1])))


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
