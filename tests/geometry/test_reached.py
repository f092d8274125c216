"""What a window reaches from voxels, held against every tap of every voxel, one at a time."""

import itertools

import pytest
import torch

from sparseconv.geometry.coord_ops import reached
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.window import Window

WINDOWS = {
    "cube": Window.of(3, 3),
    "strided": Window.of(3, (3, 2, 1), (2, 3, 1)),
    "dilated": Window.of(2, 3, 2, (3, 2)),
    "skipping": Window.of(2, 1, 3),
    "moved far": Window.of(1, 4, 2, 1, 1000),
    "cross": Window.of(2, None, 2, taps=[(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]),
    "four axes": Window.of(4, 2, (2, 1, 2, 1)),
    "wide": Window.of(2, (7, 5), (3, 2), 1, (-9, 4)),
    "tiling": Window.of(2, (2, 3), (2, 3), 1, 0),
}


def one_by_one(coords, window, to_fine, torus, within):
    """Batch items and voxels, sorted, each as often as it is reached."""
    found = []
    for (item, *voxel), offset in itertools.product(coords.tolist(), window.offsets):
        pairs = list(zip(voxel, offset, window.stride))
        if to_fine:
            place = [c * s + o for c, o, s in pairs]
        elif all((c - o) % s == 0 for c, o, s in pairs):
            place = [(c - o) // s for c, o, s in pairs]
        else:
            continue
        if torus is not None:
            place = [(p - lo) % (hi - lo) + lo for p, lo, hi in zip(place, torus.start, torus.end)]
        if within is None or all(lo <= p < hi for p, lo, hi in zip(place, within.start, within.end)):
            found.append([item, *place])
    return sorted(found)


@pytest.mark.parametrize("to_fine", [True, False], ids=["to fine", "to coarse"])
@pytest.mark.parametrize("limit", ["free", "on a torus", "within a box", "both"])
@pytest.mark.parametrize("name", WINDOWS)
def test_every_tap_of_every_voxel(name, limit, to_fine):
    window = WINDOWS[name]
    rank = len(window.stride)
    torus = IndexRange((-2,) * rank, (4,) * rank) if limit in ("on a torus", "both") else None
    within = IndexRange((-1,) * rank, (3,) * rank) if limit in ("within a box", "both") else None
    numbers = torch.Generator().manual_seed(0)
    for rows in (0, 1, 40):
        voxels = torch.randint(-4, 5, (rows, rank), generator=numbers)
        coords = torch.cat([torch.randint(0, 3, (rows, 1), generator=numbers), voxels], 1).int()
        found = reached(coords, window, to_fine=to_fine, torus=torus, within=within)
        assert found.dtype == torch.int64
        assert found.shape[1] == 1 + rank
        assert sorted(found.tolist()) == one_by_one(coords, window, to_fine, torus, within)


def test_places_past_32_bits_are_not_wrapped():
    coords = torch.tensor([[0, 2**31 - 2]], dtype=torch.int32)
    assert reached(coords, Window.of(1, 1, 2), to_fine=True).tolist() == [[0, 2**32 - 4]]
