"""What a kernel reads, and how its output channels are cut into blocks of vectors."""

from __future__ import annotations

import ctypes
from itertools import groupby, pairwise

APART = 8  # places from a counter of parts to the next, which another thread counts up
RUNS = 4  # of blocks of one shape, at most

Shape = tuple[int, ...]  # of a block: the widths of its vectors


class Operands(ctypes.Structure):
    """All strides are in elements, and all rows dense in their channels."""

    NUMBERS = (
        "arrived",
        "regions",
        "parts",
        "chunks",
        "taps",
        "groups",
        "c_in",
        "c_out",
        "in_row",
        "out_row",
        "w_row",
        "w_tap",
        "w_part",
        "y_part",
        "edges",
        "whole",
        *(f"run{i}" for i in range(RUNS)),  # blocks of each run
        *("shift", "residual_multiplier", "slope", "low"),  # of a rescale of integers
    )
    ARRAYS = ("x", "y", "w", "bias", "ins", "outs", "cuts", "bounds", "taken", "out", "multiplier", "residual")
    _fields_ = [(name, ctypes.c_int64) for name in NUMBERS] + [(name, ctypes.c_void_p) for name in ARRAYS]


PLACES = {name: place for place, name in enumerate(Operands.NUMBERS + Operands.ARRAYS)}


def columns(channels: int, vector: int, most: int) -> list[tuple[Shape, int]]:
    """Channels cut into blocks of at most ``most`` vectors: runs of (shape, blocks of it), in order of channels.

    Blocks have as many vectors as one another, or one more. Only the last vectors are narrower than ``vector``, and
    their widths are powers of two. So the shapes of all numbers of channels are few, and kernels that loop over runs
    serve every number with the same shapes.

    >>> columns(20, 16, 4)
    [((16, 4), 1)]
    >>> columns(1000, 8, 2)
    [((8,), 1), ((8, 8), 62)]
    """
    rest = channels % vector
    narrow = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    widths = [vector] * (channels // vector) + narrow
    blocks = -(-len(widths) // most)
    size, larger = divmod(len(widths), max(1, blocks))
    cuts = [min(i, blocks - larger) * size + max(0, i - blocks + larger) * (size + 1) for i in range(blocks + 1)]
    shapes = [tuple(widths[a:b]) for a, b in pairwise(cuts)]
    return [(shape, len(list(same))) for shape, same in groupby(shapes)]
